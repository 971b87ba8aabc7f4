"""Check that a voice is the one requested: a named voice of the checkpoint, or the voice in a recording."""

import asyncio
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

import aiohttp
import numpy as np
import soundfile
import torch
from torch import Tensor

from deployments.speech_detection import first_sound
from talkray_tools.listening_session import connected
from talkray_tools.recogniser import package_folder, plain_words
from talkray_tools.report.bench import ReportBench
from talkray_tools.report.frame import CannotRun
from talkray_tools.speaker_encoder import VoiceJudge
from talkray_tools.verify import SEEDS, TEXT, Check
from talkray_tools.ways import RATE, Asked, Audio, UtteranceFailed

_ENCODER = "pip install --no-deps Resemblyzer==0.1.4"
_SPOKEN = (
    "The boat drifted slowly on the lake in the evening.",
    "They were waiting for the train to come from the city.",
)
_LEAST_NEARER = 0.75  # share of speakers whose clone is closer to their own recording than to the average of others
_SAME = 0.02  # cosines that differ by less count as equal
_LONG_WORD = 4  # in letters; shorter words may match by chance


def similarity(bench: ReportBench) -> Iterator[Check]:
    """Compare named voices with those of `talkray verify`, and clones with their recordings."""
    if find_spec("resemblyzer") is None:
        raise CannotRun(f"no speaker encoder is installed: {_ENCODER}")
    judge = VoiceJudge(package_folder("resemblyzer") / "pretrained.pt", RATE)
    _ = bench.verified  # run first, because the server needs the memory; also stores voices next to the report
    files = sorted((bench.folder / "verify").glob("voice-*.wav"))
    if bench.server.kind == "base":
        yield from _clones(bench, judge)
    elif files:
        voices = {file.stem.removeprefix("voice-"): soundfile.read(file, dtype="float32")[0] for file in files}
        yield _voices(bench, judge, voices)
    else:
        yield Check("voices", None, "the checkpoint has neither built-in voices nor voice cloning")


def _voices(bench: ReportBench, judge: VoiceJudge, voices: Mapping[str, Audio]) -> Check:
    """Check that each voice of the server is nearest to the engine's rendering of the same voice, text and seed."""
    asked = {voice: Asked(TEXT, SEEDS[0], bench.server.fields | {"voice": voice}) for voice in voices}
    alike, names = _cosines(judge, asyncio.run(_listen(bench, asked)), voices), list(voices)
    wrong = [
        f"{name} sounds like {names[int(row.argmax())]}"
        for at, (name, row) in enumerate(zip(names, alike, strict=True))
        if float(row.max() - row[at]) > _SAME
    ]
    own, others = (float(each.mean()) for each in _own_and_others(alike))
    if own <= others:
        wrong.append("the voices sound alike")
    detail = (
        f"{'; '.join(wrong) or 'all are'} ({len(names)}); cosine {own:.3f} with their own, {others:.3f} with others"
    )
    return Check("voices of the server are those of the engine", not wrong, detail, {"own": own, "others": others})


def _clones(bench: ReportBench, judge: VoiceJudge) -> Iterator[Check]:
    recordings = {name: takes[0].audio for name, takes in bench.recordings.items()}
    again = {name: takes[1].audio for name, takes in bench.recordings.items() if len(takes) > 1}
    alike = _cosines(judge, again, {name: recordings[name] for name in again})
    ceiling, floor = (float(each.mean()) for each in _own_and_others(alike))
    detail = f"cosine {ceiling:.3f} for two of one speaker (ceiling), {floor:.3f} for strangers (floor)"
    yield Check("recordings", None, detail, {"ceiling": ceiling, "floor": floor})
    for how, fields in (("without transcript", {"x_vector_only_mode": True}), ("with transcript", {})):
        asked = {
            f"{name}-{number}": Asked(text, number + 1, bench.server.fields | takes[0].fields | fields)
            for name, takes in bench.recordings.items()
            for number, text in enumerate(_SPOKEN)
        }
        spoken = asyncio.run(_listen(bench, asked))
        for key, audio in spoken.items():
            soundfile.write(bench.raw / f"{key}-{how.replace(' ', '-')}.flac", audio, RATE)
        clones = {
            name: np.concatenate([spoken[f"{name}-{each}"] for each in range(len(_SPOKEN))]) for name in recordings
        }
        own, others = _own_and_others(_cosines(judge, clones, recordings))
        nearer = float((own > others).float().mean())
        detail = (
            f"cosine {own.mean():.3f} with their own recordings, {others.mean():.3f} with others; nearer to their own "
            f"for {nearer:.0%} of {len(own)} speakers, {_LEAST_NEARER:.0%} must be; published value: 0.775 (English), "
            "1.7B-Base, by another encoder, its model card, January 2026"
        )
        values = {"own": float(own.mean()), "others": float(others.mean()), "nearer": nearer}
        yield Check(f"clones {how}", nearer >= _LEAST_NEARER, detail, {**values})
        if not fields:
            yield _leakage(bench, spoken)


def _leakage(bench: ReportBench, spoken: Mapping[str, Audio]) -> Check:
    """Search the transcripts of clones for long words that occur only in the cloned recording."""
    recogniser, leaked, heard = bench.recogniser("en"), [], 0
    texts = {word for text in _SPOKEN for word in plain_words(text)}
    for key, audio in spoken.items():
        foreign = set(plain_words(bench.recordings[key.rpartition("-")[0]][0].text)) - texts
        words = plain_words(recogniser.transcribe(audio, RATE))
        heard += len(words)
        leaked += [word for word in words if word in foreign and len(word) >= _LONG_WORD]
    detail = f"{len(leaked)} of {heard} words heard come from the recording: {', '.join(leaked[:5]) or 'none'}"
    return Check("words of the recording in clones", None, detail, {"share": len(leaked) / max(1, heard)})


async def _listen(bench: ReportBench, asked: Mapping[str, Asked]) -> dict[str, Audio]:
    """Request the audio. Raises `CannotRun` if an utterance fails or is silent."""
    several, spoken = asyncio.Semaphore(bench.options.at_once), dict[str, Audio]()

    async def listen(key: str, each: Asked) -> None:
        async with several:
            spoken[key] = await bench.listen(http, each)
        bench.say(f"{len(spoken)} of {len(asked)} utterances came")

    async with connected(bench.server.url) as http:
        try:
            await asyncio.gather(*(listen(*pair) for pair in asked.items()))
        except (UtteranceFailed, aiohttp.ClientError) as error:
            raise CannotRun(f"a voice failed: {error or type(error).__name__}") from error
    if silent := [key for key, audio in spoken.items() if first_sound((audio * 32767).astype(np.int16), RATE) is None]:
        raise CannotRun(f"{', '.join(silent)}: the audio is silent, so voices cannot be compared")
    return {key: spoken[key] for key in asked}


def _cosines(judge: VoiceJudge, spoken: Mapping[str, Audio], known: Mapping[str, Audio]) -> Tensor:
    """Return cosines [speakers, speakers] of speech (rows) and recordings (columns)."""
    rows, columns = ([judge.vector(audio) for audio in each.values()] for each in (spoken, known))
    return torch.stack(rows) @ torch.stack(columns).T


def _own_and_others(alike: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors [speakers]: cosines with each speaker's own recording, and mean cosines with all others."""
    own = alike.diagonal()
    return own, (alike.sum(1) - own) / max(1, len(alike) - 1)

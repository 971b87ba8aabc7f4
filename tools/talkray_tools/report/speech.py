"""Check that speech is intelligible and ends when its text does."""

import asyncio
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import comb
from pathlib import Path

import aiohttp
import numpy as np
import soundfile

from deployments.protocol import FinishReason
from loadtest.arrivals import RequestKind
from serve_app.text.languages import language_code
from talkray_tools.judge import Judge, Judged
from talkray_tools.listening_session import ListeningSession, Log, connected
from talkray_tools.report.bench import Recorded, ReportBench
from talkray_tools.report.frame import PUBLISHED, CannotRun
from talkray_tools.spoken_texts import SENTENCES, Text, read_texts
from talkray_tools.verify import AUDIBLE_DB, Check
from talkray_tools.ways import EVENTS, Asked, Audio, Way

_SHORT, _LONG, _QUICK_SHORT, _QUICK_LONG = 1000, 50, 60, 2
_PUBLISHED_MISSES = 0.007  # maximum share of missed ends for released Base checkpoints
_SEGMENTS = 6  # segments per long prompt, each of which may miss its end
_BY_CHANCE = 0.05
_RUNAWAYS = (FinishReason.RUNAWAY, FinishReason.LOOP, FinishReason.SILENCE, FinishReason.LENGTH)
_SECONDS_A_WORD, _LEAST_S = 1.25, 6.0  # if the server gives no reason, longer speech is a runaway
_MOST_WRONG = {"english": 0.15}  # share of wrong words; small recognisers mishear words too
_MOST_WRONG_OTHERS = 0.4
_MOST_CLIPPED = 0.001  # share of samples
_QUICK = {SENTENCES: 3, "numbers": 1, "names": 1}  # texts per language
_QUICK_LIST = 10
_KEPT = 3  # utterances per language stored as files


def termination(bench: ReportBench) -> Iterator[Check]:
    """Check that speech ends by itself when its text ends."""
    languages, quick = bench.server.languages, bench.options.quick
    count = -(-(bench.options.prompts or (_QUICK_SHORT if quick else _SHORT)) // len(languages))
    said = {}
    for language in languages:
        texts = [text.written for text in read_texts(language) if text.kind == SENTENCES]
        said[language] = [Text("short", each, *[texts[each % len(texts)]] * 2) for each in range(count)]
    if "english" in said:
        pages, most = RequestKind.LONG.choices(), _QUICK_LONG if quick else _LONG
        said["english"] += [Text("long", each, *[pages[each % len(pages)]] * 2) for each in range(most)]
    listen = EVENTS.listen if bench.options.dialect == "talkray" else bench.listen
    way = bench.way(listen, "endings", kept=lambda asked: asked.told.get("finish_reason", "stop") != "stop")
    judged = [each for some in _hear(bench, way, said, recognise=False).values() for each in some]
    for kind in dict.fromkeys(each.kind for each in judged):
        yield from _endings(kind, [each for each in judged if each.kind == kind])


def _endings(kind: str, judged: Sequence[Judged]) -> Iterator[Check]:
    came = [each for each in judged if not each.failed]
    failed, reasons = [each.failed for each in judged if each.failed], Counter(map(_reason, came))
    yield Check(
        f"{kind} prompts get responses", not failed, f"{len(came)} of {len(judged)}; {failed[:1] or 'no errors'}"
    )
    for name, missed in (("do not run away", _RUNAWAYS), ("do not end early", (FinishReason.EARLY,))):
        rate = _PUBLISHED_MISSES * (_SEGMENTS if kind == "long" else 1)
        bad, most = sum(reasons[reason] for reason in missed), most_by_chance(len(judged), rate)
        what = "".join(f", {reason} {reasons[reason]}" for reason in missed if reasons[reason])
        usual = f"released Base checkpoints miss the end in up to {rate:.1%}"
        detail = f"{bad} of {len(judged)}{what}. Up to {most} can be by chance, because {usual}"
        yield Check(f"{kind} prompts {name}", bad <= most, detail, {"share": bad / len(judged)})
    if came:
        p50, p95 = (float(each) for each in np.percentile([each.tail_s for each in came], (50, 95)))
        yield Check(f"silence behind {kind} prompts", None, f"{p50:.2f} s (p50), {p95:.2f} s (p95)", {"p95_s": p95})


def _reason(judged: Judged) -> str:
    """Return the server's finish reason or, if it gives none, a reason derived from the length."""
    is_long = judged.seconds + judged.tail_s > max(_LEAST_S, judged.words * _SECONDS_A_WORD)
    return judged.reason or (FinishReason.RUNAWAY if is_long else FinishReason.STOP)


def most_by_chance(count: int, share: float = _PUBLISHED_MISSES) -> int:
    """Return the largest plausible number of misses out of `count` if each occurs with probability `share`."""
    left, misses = 1.0, -1
    while left > _BY_CHANCE:
        misses += 1
        left -= comb(count, misses) * share**misses * (1 - share) ** (count - misses)
    return misses


def _hear(
    bench: ReportBench, way: Way, said: Mapping[str, Sequence[Text]], *, recognise: bool
) -> dict[str, list[Judged]]:
    """Judge each text and store the results in log files as `make listen` does. Languages run concurrently."""
    fields = {name: value for name, value in bench.server.fields.items() if name != "voice"}
    voice, several = str(bench.server.fields.get("voice", "")), asyncio.Semaphore(max(1, (os.cpu_count() or 2) // 2))

    async def hear(language: str, texts: Sequence[Text]) -> list[Judged]:
        async with several, connected(bench.server.url) as http:
            ears = [await asyncio.to_thread(bench.recogniser, language_code(language))] if recognise else []
            log = Log(bench.raw / f"{way.name.replace(' ', '-')}-{language}.jsonl")
            session = ListeningSession(Judge(ears, language), log, fields | {"language": language})
            await session.hear(http, way, voice, texts, at_once=bench.options.at_once)
            return log.judged

    async def hear_all() -> list[list[Judged]]:
        return await asyncio.gather(*(hear(*pair) for pair in said.items()))

    return dict(zip(said, asyncio.run(hear_all()), strict=True))


def intelligibility(bench: ReportBench) -> Iterator[Check]:
    """Compare the recogniser's transcript with the text, in each language."""
    few = _QUICK if bench.options.quick else dict.fromkeys(_QUICK, 1000)
    said = {
        language: [text for text in read_texts(language) if text.number < few[text.kind]]
        for language in bench.server.languages
    }
    listed = read_seed_tts(bench.options.seed_tts) if bench.options.seed_tts else {}
    way = bench.way(bench.listen, kept=lambda asked: asked.seed <= _KEPT)
    for language, judged in _hear(bench, way, said, recognise=True).items():
        yield from _heard(language, judged)
    for language, pairs in listed.items():
        some = pairs[:_QUICK_LIST] if bench.options.quick else pairs
        recorded = {text.written: recording for text, recording in some}

        async def listen(
            http: aiohttp.ClientSession, asked: Asked, recorded: Mapping[str, Recorded] = recorded
        ) -> Audio:
            cloned = recorded[asked.text].fields if bench.server.kind == "base" else {}
            return await bench.listen(http, Asked(asked.text, asked.seed, asked.fields | cloned))

        way = bench.way(listen, "Seed-TTS", kept=lambda asked: False)
        judged = _hear(bench, way, {language: [text for text, _ in some]}, recognise=True)[language]
        share = wrong_share(judged)
        detail = f"{share:.2%} of {sum(each.words for each in judged)} wrong"
        yield Check(f"Seed-TTS, {language}", None, detail, {"wrong": share})


def _heard(language: str, judged: Sequence[Judged]) -> Iterator[Check]:
    failed, came = [each.failed for each in judged if each.failed], [each for each in judged if not each.failed]
    if failed:
        yield Check(f"{language} is answered", False, f"{len(failed)} of {len(judged)} failed: {failed[0]}")
    shares = {kind: wrong_share([each for each in judged if each.kind == kind]) for kind in _QUICK}
    unit = "characters" if language in ("chinese", "japanese", "korean") else "words"
    most = _MOST_WRONG.get(language, _MOST_WRONG_OTHERS)
    ends = sum(each.ends for each in judged) / (2 * len(judged))
    detail = (
        f"{', '.join(f'{kind} {share:.1%}' for kind, share in shares.items())} of the {unit} wrong; of the sentences "
        f"{most:.0%} may be: more are other words or another language; first and last {unit} right: {ends:.0%}; "
        f"published value: {PUBLISHED['model_card'][language]} %, 1.7B-Base, by a large recogniser, its model card, "
        "January 2026"
    )
    yield Check(f"{language} is understood", shares[SENTENCES] <= most, detail, {**shares, "ends_right": ends})
    if came:
        levels, clipped = [each.level_db for each in came], max(each.clipped for each in came)
        detail = (
            f"{np.median(levels):.1f} dB of full scale (median), {min(levels):.1f} at least, {AUDIBLE_DB:.0f} must be; "
            f"{clipped:.2%} of the samples of an utterance are clipped, {_MOST_CLIPPED:.1%} may be"
        )
        is_loud = min(levels) >= AUDIBLE_DB and clipped <= _MOST_CLIPPED
        values = {"median_db": float(np.median(levels)), "clipped": clipped}
        yield Check(f"{language} is as loud as speech", is_loud, detail, {**values})
    if opinions := [each.opinion for each in came if each.opinion]:
        mean = float(np.mean(opinions))
        yield Check(f"DNSMOS, {language}", None, f"{mean:.2f} of 5", {"dnsmos": mean})


def wrong_share(judged: Sequence[Judged]) -> float:
    """Return the share of words that are wrong according to the first recogniser."""
    return sum(next(iter(each.errors.values())) for each in judged) / max(1, sum(each.words for each in judged))


def read_seed_tts(folder: Path) -> dict[str, list[tuple[Text, Recorded]]]:
    """Read the Seed-TTS lists in `folder` (en/meta.lst, zh/meta.lst). Raises `CannotRun`."""
    found: dict[str, list[tuple[Text, Recorded]]] = {}
    for language, code in (("english", "en"), ("chinese", "zh")):
        file = folder / code / "meta.lst"
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines() if file.is_file() else ()):
            try:
                _, words, recording, text, *_ = line.split("|")
                recorded = Recorded.read(file.parent / recording, words)
            except (ValueError, OSError, soundfile.LibsndfileError) as error:
                raise CannotRun(
                    f"--seed-tts: line {number + 1} of {code}/meta.lst is not 'name|words of the recording|recording|"
                    f"text', or its recording cannot be read ({error}): correct it, or unpack the list again"
                ) from error
            found.setdefault(language, []).append((Text("Seed-TTS", number, text, text), recorded))
    if not found:
        raise CannotRun("--seed-tts: en/meta.lst and zh/meta.lst are missing. Use the folder seedtts_testset")
    return found

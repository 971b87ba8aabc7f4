"""Measure the intelligibility of a server's speech for each way of receiving audio.

    make listen                                                                   # the embedded voice, hours
    python -m tools.listening --model 1.7B-CustomVoice --language german --out heard
    python -m tools.listening --url http://127.0.0.1:8000 --sentences 20 --out heard

Offline recognisers transcribe every utterance, and the transcripts are compared with the texts. Each result is stored
immediately, so an interrupted run can resume. Plain PCM, converted by ffmpeg, is the baseline for all other ways.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import soundfile

from deployments.config import CodecConfig
from deployments.errors import TalkrayError
from serve_app.cli.ray_settings import free_port
from serve_app.cli.serve.local_server import Address
from serve_app.cli.serve.supervisor import Driver, running
from serve_app.config import AdmissionSettings, ApiSettings, AppConfig
from serve_app.text.languages import language_code, language_name
from talkray_tools.arguments import run_command
from talkray_tools.book.__main__ import book as book_command
from talkray_tools.judge import Judge
from talkray_tools.listening_session import AT_ONCE, ListeningSession, Log, builtin_voices, connected
from talkray_tools.plan.measure import commit
from talkray_tools.recogniser import Moonshine, Recogniser, Whisper
from talkray_tools.spoken_texts import SENTENCES, Text
from talkray_tools.ways import PLAIN, RATE, WAYS, Asked, Audio, Json, UtteranceFailed, Way, plain, plain_pcm
from tools.listening.table import not_come, table, worse
from tools.listening.texts import texts

logger = logging.getLogger(__name__)

DOZEN = 12  # texts per way of receiving audio, except plain PCM
_BOOK_SEED = 1000
_POOLS = {"talker": "ServeReplica:talkray:Talker", "decoder": "ServeReplica:talkray:Codec"}


@dataclass(frozen=True, slots=True)
class Other:
    """One way of receiving audio other than plain PCM."""

    way: Way
    at_once: int = AT_ONCE  # concurrent requests
    needs_voice: bool = False  # built-in voices, which some checkpoints lack


async def hear_server(
    session: ListeningSession, url: str, options: argparse.Namespace, said: list[Text], others: Sequence[Other]
) -> None:
    """Request a dozen texts in one voice, in each of the other ways."""
    dozen = [text for text in said if text.kind == SENTENCES][:DOZEN]
    async with connected(url) as http:
        voices = options.voice or await builtin_voices(http)
        for other in (each for each in others if voices[0] or not each.needs_voice):
            await session.hear(http, other.way, voices[0], dozen, at_once=other.at_once)


async def hear_plain(session: ListeningSession, url: str, options: argparse.Namespace, said: list[Text]) -> None:
    """Request plain PCM in every voice, with the hard texts last."""
    async with connected(url) as http:
        voices = options.voice or await builtin_voices(http)
        for is_hard in (False, True):
            for voice in voices:
                await session.hear(http, PLAIN, voice, [text for text in said if (text.kind != SENTENCES) is is_hard])


def book_way(url: str, folder: Path, said: list[Text]) -> Other:
    """Return the way in which a job synthesizes paragraphs of a book, all with one seed."""
    wanted, made = [text.written for text in said if text.kind == SENTENCES][:DOZEN], dict[str, Audio]()

    async def listen(http: aiohttp.ClientSession, asked: Asked) -> Audio:
        if not made:
            named: Json = {"url": url, "seed": asked.seed}
            named |= {name: asked.fields[name] for name in ("voice", "language")}
            made.update(zip(wanted, await asyncio.to_thread(read_aloud, wanted, folder, **named), strict=True))
        return made[asked.text]

    return Other(Way("a book of `talkray book`", listen, seed=_BOOK_SEED), at_once=1, needs_voice=True)


def read_aloud(wanted: Sequence[str], folder: Path, *, url: str, voice: str, language: str, seed: int) -> list[Audio]:
    """Synthesize the texts as paragraphs of a book, and cut them out at their reported positions.

    Raises `UtteranceFailed`. A complete book in `folder` is used again.
    """
    file, target = folder / "book.txt", folder / "book.flac"
    file.write_text("\n\n".join(wanted), encoding="utf-8")
    options = ["--voice", voice, "--language", language, "--seed", str(seed)]
    try:
        code = run_command(book_command, "talkray book", [str(file), "-o", str(target), "--url", url, *options])
    except TalkrayError as error:
        raise UtteranceFailed(f"talkray book: {error}") from None
    if code:
        raise UtteranceFailed(f"talkray book: exit code {code}")
    paragraphs = json.loads(target.with_suffix(".report.json").read_text(encoding="utf-8"))["paragraphs"]
    if len(paragraphs) != len(wanted):
        raise UtteranceFailed(f"the book has {len(paragraphs)} paragraphs of {len(wanted)} texts")
    audio, rate = soundfile.read(target, dtype="float32")
    if rate != RATE:
        raise UtteranceFailed(f"the book has a sample rate of {rate} Hz, not {RATE} Hz")
    return [audio[round(each["start_s"] * RATE) : round(each["end_s"] * RATE)] for each in paragraphs]


def killing_way(driver: Driver, pool: str) -> Other:
    """Return a way in which a pool's only replica is killed during each utterance."""

    async def listen(http: aiohttp.ClientSession, asked: Asked) -> Audio:
        audio = b""
        async with http.post("/v1/audio/speech", json=asked.body) as answer:
            if answer.status != 200:
                raise UtteranceFailed(f"HTTP {answer.status}: {await answer.text()}")
            async for part in answer.content.iter_any():
                if not audio:
                    await asyncio.to_thread(_kill, driver, _POOLS[pool])
                audio += part
        return plain_pcm(audio)

    return Other(Way(f"a {pool} replica killed during speech", listen), at_once=1)


def _kill(driver: Driver, title: str) -> None:
    """Kill the replica's process. Raises `UtteranceFailed` if there is none."""
    num_killed = 0
    for process in driver.folder.processes():
        with contextlib.suppress(OSError):  # the process has ended
            if title.encode() in Path(f"/proc/{process}/cmdline").read_bytes():
                os.kill(process, signal.SIGKILL)
                num_killed += 1
    if not num_killed:
        raise UtteranceFailed(f"process {title} is not running")


@contextlib.contextmanager
def server(model: str, placement: str) -> Iterator[Driver]:
    """Start a server whose admission limits are so high that even a slow machine accepts all requests."""
    patient = AdmissionSettings(max_line_s=1000, max_wait_s=1000, start_wait_s=1000, max_late_s=1000)
    codec = CodecConfig.model_validate({"placement": placement})
    config = AppConfig(model=model, codec=codec, api=ApiSettings(admission=patient))
    with running(config, Address("127.0.0.1", free_port()), logger.info) as driver:
        yield driver


def listen(options: argparse.Namespace) -> int:
    """Request the missing utterances and write the table. Return 1 if a way is worse or audio is missing."""
    said = [
        text
        for text in texts(options.language, options.texts)
        if text.kind != SENTENCES or text.number < options.sentences
    ]
    judge = Judge(_recognisers(options.language), options.language)
    log = Log(options.out / "heard.jsonl")
    session = ListeningSession(judge, log, {"language": options.language, **options.fields})
    others = [Other(way) for way in WAYS] if options.ways else []

    def hear(url: str, more: Sequence[Other] = ()) -> None:
        asyncio.run(hear_plain(session, url, options, said))
        asyncio.run(hear_server(session, url, options, said, [*others, *more]))

    if options.url:
        hear(options.url)
    else:
        with server(options.model, "hybrid") as driver:
            book = [] if options.fields else [book_way(driver.url, options.out, said)]  # without these fields
            more = [*book, *(killing_way(driver, pool) for pool in _POOLS)] if options.ways else []
            hear(driver.url, more)
        if options.ways:
            inline = Other(Way("decoded by the talker (`placement: inline`)", plain))
            with server(options.model, "inline") as driver:
                asyncio.run(hear_server(session, driver.url, options, said, [inline]))
    names = [each.name for each in judge.recognisers]
    about = f"Commit `{options.commit}`, {options.model}, {options.language}; recognisers: {', '.join(names)}."
    written = table(log.judged, names, about)
    (options.out / "listening.md").write_text(written, encoding="utf-8")
    logger.info("%s", written)
    failures = worse(log.judged, names[0]) + not_come(log.judged)
    for line in failures:
        logger.info("FAIL %s", line)
    return int(bool(failures))


def _recognisers(language: str) -> list[Recogniser]:
    """Return Whisper for all ten languages, and also Moonshine for English."""
    code = language_code(language)
    if code is None:
        raise SystemExit(f"language {language!r} has no recogniser. Use one of the ten languages of the models")
    return [Whisper(code), *([Moonshine()] if language == "english" else [])]


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.listening", description="Measure the intelligibility of a server's speech."
    )
    parser.add_argument("--model", default="embedded", help="a checkpoint directory, a released name, or embedded")
    parser.add_argument("--url", help="running server. Its replicas are not killed. Default: a new one")
    parser.add_argument("--language", type=language_name, default="english", help="language of the texts, or its code")
    parser.add_argument("--texts", type=Path, help="file in the format of tools/listening/texts.yaml")
    parser.add_argument("--sentences", type=int, default=80, help="sentences per voice, in addition to the hard texts")
    parser.add_argument("--voice", action="append", help="use only this voice; may be repeated")
    parser.add_argument(
        "--fields", type=json.loads, default={}, help="further request fields as JSON, such as instructions"
    )
    parser.add_argument("--only-plain", dest="ways", action="store_false", help="request only plain PCM")
    parser.add_argument("--out", type=Path, default=Path("heard"), help="folder of the results, to resume a run")
    parser.add_argument("--commit", default=commit(), help="commit of the server, for the table")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("faster_whisper").setLevel(logging.WARNING)
    options.out.mkdir(parents=True, exist_ok=True)
    return listen(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

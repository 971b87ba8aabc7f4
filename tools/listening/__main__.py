"""Listens to a server: how much of what is asked for is understood, by each way in which audio comes to a client.

    make listen                                                                   # the embedded voice, hours
    python -m tools.listening --model 1.7B-CustomVoice --language german --out heard
    python -m tools.listening --url http://127.0.0.1:8000 --sentences 20 --out heard

Every utterance is spoken by a server, written down by offline recognisers and compared with its text. What was heard is
written to a file at once, so that a run that was stopped goes on where it was. Each way but plain PCM is compared with
plain PCM of the same texts that ffmpeg has brought into the same form.
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

from deployments.config import CodecConfig
from serve_app.cli.ray_settings import free_port
from serve_app.cli.serve.local_server import Address
from serve_app.cli.serve.supervisor import Driver, running
from serve_app.config import AdmissionSettings, ApiSettings, AppConfig
from serve_app.text.languages import language_code, language_name
from talkray_tools.judge import Judge
from talkray_tools.listening_session import AT_ONCE, ListeningSession, Log, builtin_voices, connected
from talkray_tools.plan.measure import commit
from talkray_tools.recogniser import Moonshine, Recogniser, Whisper
from talkray_tools.spoken_texts import SENTENCES, Text
from talkray_tools.ways import PLAIN, WAYS, Asked, Audio, Json, UtteranceFailed, Way, plain, plain_pcm
from tools.listening.book import read_aloud
from tools.listening.table import not_come, table, worse
from tools.listening.texts import texts

logger = logging.getLogger(__name__)

DOZEN = 12  # texts of one voice for each way but plain PCM
_BOOK_SEED = 1000
_POOLS = {"talker": "ServeReplica:talkray:Talker", "decoder": "ServeReplica:talkray:Codec"}


@dataclass(frozen=True, slots=True)
class Other:
    """A way but plain PCM."""

    way: Way
    at_once: int = AT_ONCE  # texts that are asked for together
    needs_voice: bool = False  # which some checkpoints do not have


async def hear_server(
    session: ListeningSession, url: str, options: argparse.Namespace, said: list[Text], others: Sequence[Other]
) -> None:
    """Other ways with a dozen texts of one voice each."""
    dozen = [text for text in said if text.kind == SENTENCES][:DOZEN]
    async with connected(url) as http:
        voices = options.voice or await builtin_voices(http)
        for other in (each for each in others if voices[0] or not each.needs_voice):
            await session.hear(http, other.way, voices[0], dozen, at_once=other.at_once)


async def hear_plain(session: ListeningSession, url: str, options: argparse.Namespace, said: list[Text]) -> None:
    """Plain PCM in every voice, the hard texts last."""
    async with connected(url) as http:
        voices = options.voice or await builtin_voices(http)
        for is_hard in (False, True):
            for voice in voices:
                await session.hear(http, PLAIN, voice, [text for text in said if (text.kind != SENTENCES) is is_hard])


def book_way(url: str, folder: Path, said: list[Text]) -> Other:
    """Paragraphs of a book: a job makes them, all with one seed."""
    wanted, made = [text.written for text in said if text.kind == SENTENCES][:DOZEN], dict[str, Audio]()

    async def listen(http: aiohttp.ClientSession, asked: Asked) -> Audio:
        if not made:
            named: Json = {"url": url, "seed": asked.seed}
            named |= {name: asked.fields[name] for name in ("voice", "language")}
            made.update(zip(wanted, await asyncio.to_thread(read_aloud, wanted, folder, **named), strict=True))
        return made[asked.text]

    return Other(Way("a book of `talkray book`", listen, seed=_BOOK_SEED), at_once=1, needs_voice=True)


def killing_way(driver: Driver, pool: str) -> Other:
    """The one replica of a pool is killed in the middle of each utterance."""

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

    return Other(Way(f"a {pool} replica killed in the middle", listen), at_once=1)


def _kill(driver: Driver, title: str) -> None:
    """Raises UtteranceFailed where there is nobody to kill."""
    num_killed = 0
    for process in driver.folder.processes():
        with contextlib.suppress(OSError):  # it has ended
            if title.encode() in Path(f"/proc/{process}/cmdline").read_bytes():
                os.kill(process, signal.SIGKILL)
                num_killed += 1
    if not num_killed:
        raise UtteranceFailed(f"no {title} runs")


@contextlib.contextmanager
def server(model: str, placement: str) -> Iterator[Driver]:
    """One of our own that refuses nobody because the machine is slow."""
    patient = AdmissionSettings(max_line_s=1000, max_wait_s=1000, start_wait_s=1000, max_late_s=1000)
    codec = CodecConfig.model_validate({"placement": placement})
    config = AppConfig(model=model, codec=codec, api=ApiSettings(admission=patient))
    with running(config, Address("127.0.0.1", free_port()), logger.info) as driver:
        yield driver


def listen(options: argparse.Namespace) -> int:
    """Hear what is missing and write the table; the exit code is 1 where a way is worse or audio did not come."""
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
            book = [] if options.fields else [book_way(driver.url, options.out, said)]  # it has no place for these
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
    """Whisper for all ten languages, Moonshine for English besides."""
    code = language_code(language)
    if code is None:
        raise SystemExit(f"no recogniser knows {language!r}: name one of the ten languages of the models")
    return [Whisper(code), *([Moonshine()] if language == "english" else [])]


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.listening", description="Measure how much of what a server says is understood."
    )
    parser.add_argument("--model", default="embedded", help="a checkpoint directory, a released name, or embedded")
    parser.add_argument("--url", help="a server that runs, in place of one of our own: nothing of it is killed")
    parser.add_argument("--language", type=language_name, default="english", help="one of the ten, or its code")
    parser.add_argument("--texts", type=Path, help="a file in the form of tools/listening/texts.yaml")
    parser.add_argument("--sentences", type=int, default=80, help="for each voice, besides the hard texts")
    parser.add_argument("--voice", action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--fields", type=json.loads, default={}, help="more of each request, as JSON: instructions, ref_audio"
    )
    parser.add_argument("--only-plain", dest="ways", action="store_false", help="plain PCM, no other way")
    parser.add_argument("--out", type=Path, default=Path("heard"), help="a folder, where a run goes on")
    parser.add_argument("--commit", default=commit(), help="of the server, for the table")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("faster_whisper").setLevel(logging.WARNING)
    options.out.mkdir(parents=True, exist_ok=True)
    return listen(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What is heard is what was asked for: sentences that no training held, by each way to a client, written down again.

Put back by hand, the faults that this shall find are found: frames that are given instead of made, a codec that forgets
its state between two chunks, an MP3 without its first packet.
"""

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import av
import numpy as np
import pytest

from deployments.weights.store import locate
from serve_app.text.splitting import split_text
from talkray_tools.recogniser import Moonshine, plain_words, word_errors
from tests.e2e.conftest import TALKER
from tests.e2e.heard import Samples, begins_with_hiss, steps_where_joined
from tests.e2e.speech import BOUND_S, body, fetch
from tools.experiments.faults.polite import difference

pytestmark = pytest.mark.anyio

RATE = 24000
SEGMENT: int = json.loads((locate("embedded") / "config.json").read_text())["talkray"]["max_segment_chars"]
SEED = 5
MORE_ERRORS = 0.03  # of all words, than commit aa6093a had
LONG = (
    "The boat drifted on the lake. "
    "The hen settled herself on the nest most peacefully. "
    "It will take money, good planning and, above all, teamwork. "
    "Less durable rocks were gradually worn away to form valleys. "
    "He had never grown accustomed to the monotony of his work. "
    "The period covered the turn of the century."
)
VOICES = ("felix", "hugo")
# Of all words, as aa6093a had them: 6 of 226, two of them "home stretch" for "homestretch". First and last words were
# right in 37 of 40.
ERRORS_BEFORE = 0.027


@dataclass(frozen=True, slots=True)
class Heard:
    text: str
    samples: Samples
    is_exact: bool = True  # no lossy format in between
    joints: tuple[int, ...] = ()


Listen = Callable[[aiohttp.ClientSession, str, str], Awaitable[Heard]]


def asked(text: str, voice: str, **fields: object) -> dict[str, object]:
    return body(text, voice=voice, seed=SEED, **fields)


def pcm(content: bytes) -> Samples:
    return np.frombuffer(content, "<i2")


async def plain(http: aiohttp.ClientSession, text: str, voice: str) -> Heard:
    return Heard(text, pcm(await fetch(http, asked(text, voice))))


async def whole(http: aiohttp.ClientSession, text: str, voice: str) -> Heard:
    content = await fetch(http, asked(text, voice, stream=False))
    assert difference(content, await fetch(http, asked(text, voice))) is None
    return Heard(text, pcm(content))


async def mp3(http: aiohttp.ClientSession, text: str, voice: str) -> Heard:
    """Decoded again, it says at each moment what the same PCM says."""
    content = await fetch(http, asked(text, voice, response_format="mp3"))
    resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
    with av.open(io.BytesIO(content)) as container:
        frames = [part for frame in container.decode(audio=0) for part in resampler.resample(frame)]
    decoded = np.concatenate([frame.to_ndarray()[0] for frame in frames])
    exact = pcm(await fetch(http, asked(text, voice)))
    delay_s = lag(decoded, exact) / RATE
    assert abs(delay_s - MP3_DELAY_S) < 0.005, f"{delay_s:.4f} s behind the PCM: a packet is missing, or one too many"
    return Heard(text, decoded, is_exact=False)


MP3_DELAY_S = 0.046  # of the encoder, and of a decoder that does not know it


def lag(later: Samples, exact: Samples) -> int:
    """By how many samples `later` is behind, from where the two are most alike."""
    size = len(later) + len(exact)
    spectrum = np.fft.rfft(later.astype(float), size) * np.conj(np.fft.rfft(exact.astype(float), size))
    place = int(np.argmax(np.fft.irfft(spectrum, size)))
    return place if place < size // 2 else place - size


async def long_text(http: aiohttp.ClientSession, text: str, voice: str) -> Heard:
    """Its first segment alone has the same audio, so its length says where the joint is."""
    first, *rest = split_text(text, SEGMENT)
    assert rest
    audio, before = await fetch(http, asked(text, voice)), await fetch(http, asked(first, voice))
    assert difference(audio[: len(before)], before) is None
    return Heard(text, pcm(audio), joints=(len(before) // 2,))


async def live(http: aiohttp.ClientSession, text: str, voice: str) -> Heard:
    """Word by word over one socket, as a language model writes."""
    config = {name: value for name, value in asked(text, voice).items() if name != "input"}
    audio = b""
    async with asyncio.timeout(BOUND_S), http.ws_connect("/v1/audio/speech/stream") as socket:
        await socket.send_json({"type": "session.config", **config})
        for word in text.split():
            await socket.send_json({"type": "input.text", "text": f"{word} "})
        await socket.send_json({"type": "input.done"})
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                audio += message.data
            elif json.loads(message.data)["type"] == "session.done":
                break
    return Heard(text, pcm(audio))


# Chosen over several seeds and both voices: in nearly all the recogniser had their first and last words right, because
# another processor rounds otherwise and so draws other codes.
SAID: tuple[tuple[Listen, str], ...] = (
    (plain, "An impressionable youngster."), (plain, "Appeal to somebody for help."),
    (plain, "The latest crop of fashions is about to hit the stores."),
    (plain, "They were on the homestretch when the computer crashed."),
    (mp3, "Technological development."),
    (mp3, "He had never grown accustomed to the monotony of his work."),
    (whole, "A likely place for a restaurant."), (live, "The population of India is exploding."),
    (live, "The boat drifted on the lake."), (long_text, LONG),
)  # fmt: skip
# Sentences that begin with vowels: nothing in them hisses. The bursts of "t" and "d" are above 4 kHz by themselves.
NOT_HISSING = ("An ", "A ", "Appeal")


@pytest.fixture(scope="module")
async def heard(http: aiohttp.ClientSession) -> list[Heard]:
    several = asyncio.Semaphore(TALKER.max_num_seqs)  # LONG, which stands last, begins with the others

    async def listened(listen: Listen, text: str, voice: str) -> Heard:
        async with several:
            return await listen(http, text, voice)

    return await asyncio.gather(*(listened(listen, text, voice) for listen, text in SAID for voice in VOICES))


@pytest.fixture(scope="module")
def written(heard: list[Heard]) -> list[tuple[list[str], list[str]]]:
    recogniser = Moonshine()
    return [
        (plain_words(each.text), plain_words(recogniser.transcribe(each.samples.astype(np.float32) / 32768, RATE)))
        for each in heard
    ]


async def test_words_are_understood(written: list[tuple[list[str], list[str]]]) -> None:
    errors = sum(word_errors(wanted, got) for wanted, got in written)
    rate = errors / sum(len(wanted) for wanted, _ in written)
    assert rate <= ERRORS_BEFORE + MORE_ERRORS, [pair for pair in written if pair[0] != pair[1]]


async def test_first_and_last_words_are_there(written: list[tuple[list[str], list[str]]]) -> None:
    right = [wanted[place] == got[place] for wanted, got in written for place in (0, -1) if got]
    assert sum(right) >= 0.9 * 2 * len(written), [pair for pair in written if pair[0] != pair[1]]


async def test_no_utterance_begins_with_a_hiss(heard: list[Heard]) -> None:
    soft = [each for each in heard if each.text.startswith(NOT_HISSING)]
    hissing = [each.text for each in soft if begins_with_hiss(each.samples, RATE)]
    assert len(soft) == len(NOT_HISSING) * len(VOICES)
    assert len(hissing) <= 0.1 * len(soft), hissing


async def test_no_step_where_audio_begins_is_joined_or_ends(heard: list[Heard]) -> None:
    steps = {each.text: steps_where_joined(each.samples, each.joints) for each in heard if each.is_exact}
    assert {text: places for text, places in steps.items() if places} == {}


async def test_every_voice_is_described(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/audio/voices") as answer:
        voices = (await answer.json())["voices"]
    assert len(voices) > 4
    assert [voice for voice in voices if not (voice["language"] and voice["gender"] and voice["description"])] == []

"""Attacks by hostile clients. `ATTACKS` has one row per attack. An attack runs once and returns its result."""

import asyncio
import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import aiohttp

from tools.experiments.faults import floods, hoards
from tools.experiments.faults.intruder import (
    CONTEXTS,
    CUT_S,
    DASHSCOPE,
    FILL_S,
    FLUX,
    FREED_S,
    HELD_S,
    KIB,
    PAUSE_S,
    PER_MINUTE,
    SHORT,
    Broken,
    Intruder,
    Json,
)
from tools.suites.raw import SPEECH
from tools.suites.rows import POSTS, SOCKETS

# --- 8: addresses ---


async def has_many_addresses(me: Intruder) -> str:
    """Send more requests than the limit of an address, each from a different address of the same /64."""
    async with me.http() as http:

        async def ask(number: int) -> bool:
            headers = {"X-Forwarded-For": f"2001:db8:1:2:{number:x}:{number:x}::1"}
            async with http.post(SPEECH, data=b"{}", headers=headers) as answer:
                return "requests per minute" in await answer.text()

        for start in range(0, PER_MINUTE + 20, 4):
            if any(await asyncio.gather(*map(ask, range(start, start + 4)))):
                return "429"
    raise Broken(f"one /64 makes over {PER_MINUTE} requests in a minute, each from another address")


# --- 12: numbers ---

DIGITS = "9" * 5000
NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1", "0", "1e-320", DIGITS, f"1e{DIGITS}", "1" * 400, "true")
QUERIES = (
    *(f"/v1/speak?encoding=opus&bit_rate={number}" for number in ("nan", "inf", "1e999", "-inf", "300000", "512000")),
    *(f"/v1/speak?{name}={number}" for name in ("sample_rate", "speed") for number in ("nan", "inf", "1e999", DIGITS)),
    *(f"/v1/text-to-speech/ryan?output_format={name}" for name in ("opus_48000_510", "pcm_0", "mp3_44100_0")),
    *(f"/v1/text-to-speech/ryan?output_format={name}_{DIGITS}" for name in ("pcm", "mp3_44100", "opus_48000")),
)


def numbered(body: Json, number: str) -> bytes:
    """Replace "NUMBER" in the body with any text, which may be an invalid number."""
    return json.dumps(body).replace('"NUMBER"', number).encode()


async def asks_for_no_number(me: Intruder) -> str:
    """Send an invalid or too large number in a random numeric field."""
    chance = random.Random()
    bodies: dict[str, Json] = {
        SPEECH: {**SHORT, chance.choice(["speed", "seed", "sample_rate", "temperature", "top_k"]): "NUMBER"},
        "/api/v1/services/aigc/multimodal-generation/generation": {
            "input": {"text": "Hello."},
            "parameters": {chance.choice(["bit_rate", "speech_rate", "sample_rate"]): "NUMBER"},
        },
        "/tts/bytes": {
            "transcript": "Hello.",
            "voice": "ryan",
            "generation_config": {"speed": "NUMBER"},
            "output_format": {"container": "mp3", chance.choice(["sample_rate", "bit_rate"]): "NUMBER"},
        },
        "/v1/text-to-speech/ryan": {
            "text": "Hello.",
            "seed": "NUMBER",
            "voice_settings": {"speed": chance.choice(["NUMBER", 1.1])},
        },
    }
    path, body = chance.choice([*bodies.items(), *((query, {"text": "Hello."}) for query in QUERIES)])
    return await me.post(path, numbered(body, chance.choice(NUMBERS)))


async def interrupts_at_no_number(me: Intruder) -> str:
    """Interrupt Deepgram Flux at an invalid number, and check that the server handles later messages."""
    async with me.talking(FLUX) as talking:
        await talking.send_json({"type": "Speak", "text": "Good morning, and thank you for calling."})
        await talking.send_json({"type": "Flush"})
        while (await talking.receive(HELD_S)).type is aiohttp.WSMsgType.TEXT:
            pass
        for number in ("NaN", "Infinity", "1e999", DIGITS):
            await talking.send_str(f'{{"type":"Interrupt","playback_offset":{{"type":"time_ms","value":{number}}}}}')
            await talking.send_str(f'{{"type":"Configure","speed":{number}}}')
        await talking.send_json({"type": "Configure", "speed": 1.1})
        while (message := await talking.receive(HELD_S)).type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            if message.type is aiohttp.WSMsgType.TEXT and message.json()["type"] == "ConfigureSuccess":
                return "open"
        raise Broken(f"an Interrupt at NaN ends its handler: closed with {talking.close_code}")


# --- 14: halves of characters ---

LIVE: dict[str, tuple[list[Json], Json]] = {
    FLUX: ([], {"type": "Speak", "text": "TEXT"}),
    "/v1/speak?model=aura-2-ryan-en": ([], {"type": "Speak", "text": "TEXT"}),
    CONTEXTS: ([], {"context_id": "one", "text": "TEXT"}),
    "/tts/websocket": ([], {"context_id": "one", "voice": "ryan", "continue": True, "transcript": "TEXT"}),
    DASHSCOPE: ([], {"type": "input_text_buffer.append", "text": "TEXT"}),
    f"{SPEECH}/stream": ([{"type": "session.config", "voice": "ryan"}], {"type": "input.text", "text": "TEXT"}),
}


async def cuts_characters(me: Intruder) -> str:
    """Send the halves of a surrogate pair in two messages, and check that the server accepts both."""
    path = random.choice([*LIVE])
    first, message = LIVE[path]
    async with me.talking(path) as talking:
        for said in (
            *first,
            *({**message, **_with_text(message, text)} for text in ("Hello \ud83d", "\ude42 there. ")),
        ):
            await talking.send_json(said)
        with contextlib.suppress(TimeoutError):
            while (answer := await talking.receive(0.5)).type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                said = answer.json() if answer.type is aiohttp.WSMsgType.TEXT else {}
                if said.get("type") in ("error", "Error", "Warning") or "error" in said:
                    raise Broken(f"half a character is refused at {path.partition('?')[0]}")
    return "open"


def _with_text(message: Json, text: str) -> Json:
    return {name: text for name, value in message.items() if value == "TEXT"}


# --- 18: fuzzing ---

TEXTS = tuple(
    (piece * (64 * KIB))[: 64 * KIB - 1]
    for piece in ("<", "<a ", "[", "[a](", "- word\n", "* ", "\ud83d", "\ude42", '{"word":"', "a", "a ", "1", ".", "'")
)


def bent(value: object, chance: random.Random) -> object:
    """Replace texts and numbers of a message or body with invalid values."""
    match value:
        case str() if value.strip() == "TEXT":
            return chance.choice(TEXTS)
        case bool():
            return value
        case int() | float():
            return f"@{chance.choice(NUMBERS)}@"
        case dict():
            return {name: bent(item, chance) if chance.random() < 0.6 else item for name, item in value.items()}
        case list():
            return [bent(item, chance) for item in value]
    return value


def spelled(value: object) -> str:
    """Serialize as JSON, including values that are invalid in JSON."""
    return re.sub(r'"@([^"@]*)@"', r"\1", json.dumps(value))


async def sends_anything(me: Intruder) -> str:
    """Send a random dialect its own messages with invalid numbers and 64 KB of slow text."""
    chance = random.Random()
    if chance.random() < 0.5:
        post = chance.choice([*POSTS.values()])
        return await me.post(post.path, spelled(bent(post.body("TEXT", **post.more), chance)).encode())
    row = chance.choice([*SOCKETS.values()])
    path, _, query = chance.choice(row.paths).partition("?")
    fields = parse_qsl(query)
    if chance.random() < 0.3:
        fields = [(name, chance.choice(NUMBERS) if value[0].isdigit() else value) for name, value in fields]
    messages = [spelled(bent(message, chance)) for message in chance.choices(row.messages("TEXT"), k=5)]
    path = f"{path}?{'&'.join(f'{name}={value}' for name, value in fields)}"
    return await me.say(path, messages, reads_s=0.2, protocols=row.sample.protocols)


Act = Callable[[Intruder], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Attack:
    """Row of the table. An attacker repeats the act for `window_s`, next to `many - 1` other attackers."""

    name: str
    entry: int  # entry in the list of threats in docs/security.md; 0: normal behaviour on a public server
    act: Act
    many: int = 2
    window_s: float = 6.0
    takes_every_place: bool = False  # listeners may be rejected; the act measures for how long
    is_beside: bool = False  # well-behaved, and runs next to all attacks
    gets: str = ""  # the only acceptable status


WHOLE = json.dumps(SHORT).encode()
PART: dict[str, Any] = {"body": b'{"input":', "announced": 100_000}
ATTACKS: tuple[Attack, ...] = (
    Attack("leaves", 0, floods.leaves),
    Attack("closes its half", 0, partial(floods.sends_a_body, body=WHOLE, closes=True), window_s=2),
    Attack("ends its body early", 0, partial(floods.sends_a_body, **PART, closes=True), window_s=2),
    Attack("never ends its body", 0, partial(floods.sends_a_body, **PART, closes=False), many=6, window_s=2),
    Attack("sends garbage", 0, floods.sends_garbage, window_s=2, gets="400"),
    Attack("sends no JSON", 0, floods.sends_no_json, window_s=2, gets="400"),
    Attack("guesses keys", 0, floods.guesses_keys, window_s=2, gets="401"),
    Attack("asks for nines", 0, partial(floods.asks_for, text="9" * 4096), window_s=2, gets="400"),  # it grows
    Attack("reads slowly", 0, floods.reads_slowly, many=4),
    Attack("messages unfinished", 0, floods.leaves_messages_unfinished, many=1),
    Attack("unknown fields", 1, floods.names_unknown_fields, many=1, window_s=12),
    Attack("unknown fields to sockets", 1, floods.names_unknown_fields_to_sockets),
    Attack("an hour of text at once", 2, floods.writes_an_hour_at_once, many=1, window_s=8),
    Attack("open brackets", 2, partial(floods.writes, text="[" + "words and " * 6000), many=1),  # a link without an end
    Attack("bullets", 2, partial(floods.writes, text="- word\n" * 9000), many=1),
    # Text that may become markup: longer than the limit, then exactly at the limit, so the server parses all of it.
    Attack("tags, too long", 2, partial(floods.asks_for, text="<" + "a" * 40_000), many=1, window_s=8, gets="400"),
    Attack("tags, as long as may be", 2, partial(floods.asks_for, text="<" + "a" * 4000), many=1),
    Attack("a pronunciation", 2, floods.explains_a_pronunciation, many=1),
    Attack("a batch", 3, floods.asks_for_a_batch, many=2, window_s=12),
    Attack("a whole answer", 3, floods.asks_for_a_whole_answer, many=3, window_s=8),
    Attack("never commits", 4, floods.appends_and_never_commits, many=1, window_s=10),
    Attack("contexts with long names", 4, floods.opens_contexts_with_long_names, many=1, window_s=10),
    Attack("unknown settings", 4, floods.updates_with_unknown_settings, many=1),
    Attack("names a recording", 4, floods.names_a_recording, many=1),
    Attack("pings and reads nothing", 4, floods.pings_and_reads_nothing, many=1, window_s=13),
    Attack("stalls its recordings", 5, floods.stalls_its_recordings, many=1, window_s=8),
    Attack("stalls its messages", 5, floods.stalls_its_messages, many=1, window_s=8),
    Attack("reads nothing", 6, floods.reads_nothing, many=1, window_s=FILL_S + FREED_S + 7, takes_every_place=True),
    Attack("pauses its player", 7, floods.pauses, many=1, window_s=PAUSE_S + 15, is_beside=True),
    Attack("many addresses", 8, has_many_addresses, many=1, window_s=8),
    Attack("no number", 12, asks_for_no_number, window_s=10),
    Attack("interrupts at no number", 12, interrupts_at_no_number, many=1),
    Attack("half a character", 14, cuts_characters),
    Attack("a long transcript is stored", 19, hoards.stores_a_long_transcript, many=1, window_s=8, gets="400"),
    Attack("long words of voices are listed", 19, hoards.stores_long_words_and_lists_them, window_s=8, gets="400"),
    Attack("archives of voices", 19, hoards.asks_for_archives, many=1, window_s=20),
    Attack("types beside a lexicon", 19, hoards.types_beside_a_lexicon, window_s=12),
    Attack("lists many parts", 19, hoards.lists_many_parts, many=1, window_s=20),
    Attack("fetches finished audio", 19, hoards.fetches_finished_audio, many=1, window_s=20),
    Attack("plans without end", 19, hoards.plans_a_job_without_end, many=1, window_s=20),
    Attack("anything", 18, sends_anything, many=4, window_s=20),
)


async def once(act: Act, me: Intruder) -> str:
    """Run one act and return its result, "broken: ..." if a limit did not hold."""
    try:
        return await act(me)
    except Broken as error:
        return f"broken: {error}"
    except aiohttp.WSServerHandshakeError as error:
        return str(error.status)
    except (OSError, EOFError, TimeoutError, aiohttp.ClientError) as error:
        return type(error).__name__


def strike(attack: Attack, port: int, keys: tuple[str, str], within_s: float, many: int) -> Counter[str]:
    """Run many attackers that repeat the act in a separate process, and count the results."""
    return asyncio.run(_strike(attack, port, keys, within_s, many))


async def _strike(attack: Attack, port: int, keys: tuple[str, str], within_s: float, many: int) -> Counter[str]:
    got: Counter[str] = Counter()

    async def go_on(number: int) -> None:
        count = 0
        while True:
            address = f"127.{number + 1}.{attack.entry + 1}.{count % 250 + 1}"
            got[await once(attack.act, Intruder(port, *keys[:1], address, keys[1]))] += 1
            count += 1
            await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(go_on(number)) for number in range(many)]
    done, cut = await asyncio.wait(tasks, timeout=within_s)
    for task in cut:
        task.cancel()
    if cut:
        await asyncio.wait(cut, timeout=CUT_S)  # some clients wait for a server that does not respond to a close
    for task in done:
        task.result()  # re-raise errors of the act
    got["cut off"] = len(cut)
    return got

"""What hostile clients do: `ATTACKS` has a row for each act. An act is done once, and returns what it got."""

import asyncio
import contextlib
import json
import os
import random
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import aiohttp

from tests.faults.hostile import SPEECH, frame, handshake
from tests.fuzz.test_dialects import BODIES, REST, SOCKETS

HELD_S = 12.0  # that a connection is held
PAUSE_S = 45.0  # for which a client that means well reads nothing; a WebSocket was closed with 1011 after 40
FILL_S = 10.0  # within which intruders take every place
FREED_S = 25.0  # after which a reader that reads nothing holds no place
OTHERS_S = 5.0  # within which another client's recording is taken in
CUT_S = 2.0  # that an act may take to end once its time is over
PER_MINUTE = 300  # requests that the server lets an address make
STREAMS = 16  # that the server speaks at once
SHORT = {"input": "Hello.", "voice": "alloy", "response_format": "pcm", "max_new_tokens": 2}
ENDLESS = {**SHORT, "input": "I will not stop.", "ignore_eos": True, "max_new_tokens": 900}
LOUD = {**ENDLESS, "response_format": "pcm_f32le", "sample_rate": 48000, "speed": 0.25}  # 60 KB a frame
KIB, MIB = 1 << 10, 1 << 20
FLUX = "/v2/speak?model=flux-ryan-en&encoding=linear16&sample_rate=24000"
CONTEXTS = "/v1/text-to-speech/ryan/multi-stream-input?output_format=pcm_24000"
DASHSCOPE = "/api-ws/v1/realtime"

Json = dict[str, Any]


class Broken(Exception):
    """A limit did not hold; the message says which."""


@dataclass(frozen=True, slots=True)
class Intruder:
    """One that means no good: a valid key, and an address of its own. `polite_key` is that of another client."""

    port: int
    key: str
    address: str
    polite_key: str = ""

    @property
    def polite(self) -> "Intruder":
        """A client that means well, to whom something may happen."""
        return replace(self, key=self.polite_key, address="127.0.0.199")

    @property
    def headers(self) -> dict[str, str]:
        """Key and address; a server that trusts one proxy does not believe the latter."""
        return {"Authorization": f"Bearer {self.key}", "X-Forwarded-For": self.address}

    @contextlib.asynccontextmanager
    async def http(self, *, buffer: int | None = None) -> AsyncIterator[aiohttp.ClientSession]:
        """With `buffer` its connections take in so many bytes that it has not read, and a little more."""
        made = (lambda info: _small(buffer, info[0])) if buffer else None
        connector = aiohttp.TCPConnector(local_addr=(self.address, 0), socket_factory=made)
        url, timeout = f"http://127.0.0.1:{self.port}", aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(url, connector=connector, timeout=timeout, headers=self.headers) as http:
            yield http

    async def post(self, path: str, body: Json | bytes, **headers: str) -> str:
        """The status; the body of the answer is read and dropped."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **headers}
        async with self.http() as http, http.post(path, data=data, headers=sent) as answer:
            async for _ in answer.content.iter_any():
                pass
            return str(answer.status)

    @contextlib.asynccontextmanager
    async def talking(
        self, path: str, *, protocols: Iterable[str] = (), buffer: int | None = None
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A WebSocket; who leaves it does not wait for the server."""
        async with self.http(buffer=buffer) as http:
            timeout = aiohttp.ClientWSTimeout(ws_close=0.5)
            async with http.ws_connect(path, protocols=tuple(protocols), timeout=timeout, max_msg_size=0) as talking:
                yield talking

    async def say(
        self, path: str, messages: Iterable[str | Json], *, reads_s: float = 0.5, protocols: Iterable[str] = ()
    ) -> str:
        """Sends messages, reads until nothing comes for so long, and leaves."""
        async with self.talking(path, protocols=protocols) as talking:
            for message in messages:
                await talking.send_str(message if isinstance(message, str) else json.dumps(message))
            return await rest(talking, reads_s)

    @contextlib.asynccontextmanager
    async def raw(self) -> AsyncIterator[socket.socket]:
        """A bare connection, whose answers nobody reads until it is asked to."""
        loop = asyncio.get_running_loop()
        with _small(4096) as raw:
            raw.bind((self.address, 0))
            await loop.sock_connect(raw, ("127.0.0.1", self.port))
            yield raw

    def request(self, body: bytes, *, announced: int | None = None, path: str = SPEECH) -> bytes:
        """A POST as bytes; a part of its body where more is `announced`."""
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines += [f"Content-Length: {len(body) if announced is None else announced}", "", ""]
        return "\r\n".join(lines).encode() + body


def _small(buffer: int, family: int = socket.AF_INET) -> socket.socket:
    """A socket that takes in little of what nobody reads."""
    raw = socket.socket(family)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    raw.setblocking(False)
    return raw


async def rest(talking: aiohttp.ClientWebSocketResponse, within_s: float) -> str:
    """How a WebSocket goes on: "open" where nothing comes for so long, else how it was closed."""
    try:
        while True:
            message = await talking.receive(within_s)
            if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                return f"closed {talking.close_code}"
    except TimeoutError:
        return "open"


async def first_line(raw: socket.socket, within_s: float = HELD_S) -> str:
    """The status of the answer on a bare connection, of which all is read."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(within_s):
            while data := await asyncio.get_running_loop().sock_recv(raw, 65536):
                answer = answer or data
    words = answer.partition(b"\r\n")[0].split(b" ")
    return words[1].decode(errors="replace") if len(words) > 1 and answer.startswith(b"HTTP/") else "no answer"


async def sent(raw: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(raw, data)


async def upgrade(raw: socket.socket, key: str) -> None:
    """Makes a bare connection a WebSocket of the native path."""
    await sent(raw, handshake(key))
    async with asyncio.timeout(HELD_S):
        while b"\r\n\r\n" not in (data := await asyncio.get_running_loop().sock_recv(raw, 4096)):
            if not data:
                raise EOFError


# --- what clients do in every hour of a public server ---


async def leaves(me: Intruder) -> str:
    """Asks for minutes of speech, and leaves after the first of it."""
    async with me.http() as http, http.post(SPEECH, json=ENDLESS) as answer:
        await answer.content.readany()
        return str(answer.status)


async def closes_its_half(me: Intruder) -> str:
    """Sends a whole request, and that it will send nothing more."""
    async with me.raw() as raw:
        await sent(raw, me.request(json.dumps(SHORT).encode()))
        raw.shutdown(socket.SHUT_WR)
        return await first_line(raw)


async def ends_its_body_early(me: Intruder) -> str:
    """Closes its half in the middle of the body."""
    async with me.raw() as raw:
        await sent(raw, me.request(b'{"input":', announced=100_000))
        raw.shutdown(socket.SHUT_WR)
        return await first_line(raw)


async def never_ends_its_body(me: Intruder) -> str:
    """Holds a connection whose body does not come."""
    async with me.raw() as raw:
        await sent(raw, me.request(b'{"input":', announced=100_000))
        return await first_line(raw)


async def sends_garbage(me: Intruder) -> str:
    async with me.raw() as raw:
        await sent(raw, os.urandom(2048) + b"\r\n\r\n")
        return await first_line(raw)


async def sends_no_json(me: Intruder) -> str:
    """A request whose body is none."""
    return await me.post(SPEECH, os.urandom(512))


async def guesses_keys(me: Intruder) -> str:
    return await replace(me, key=f"{me.key[:-4]}nope").post(SPEECH, SHORT)


async def asks_for_nines(me: Intruder) -> str:
    """A text that grows when it is spoken."""
    return await me.post(SPEECH, {**SHORT, "input": "9" * 4096})


async def reads_slowly(me: Intruder) -> str:
    """Takes little of an endless utterance, then leaves."""
    loop = asyncio.get_running_loop()
    async with me.raw() as raw:
        await sent(raw, me.request(json.dumps(ENDLESS).encode()))
        answer = b""
        for _ in range(int(2 * HELD_S)):
            data = await asyncio.wait_for(loop.sock_recv(raw, 512), HELD_S)
            answer = answer or data
            await asyncio.sleep(0.5)
        return answer[9:12].decode()


async def leaves_messages_unfinished(me: Intruder) -> str:
    """Ten sockets with a megabyte each of a message that does not end."""
    async with contextlib.AsyncExitStack() as opened:
        for _ in range(10):
            raw = await opened.enter_async_context(me.raw())
            await upgrade(raw, me.key)
            await sent(raw, frame(b" " * MIB, final=False))
        await asyncio.sleep(HELD_S / 2)
    return "held"


# --- 1: fields that nobody knows ---


@cache
def unknown(count: int) -> str:
    """So many, as the inside of a JSON object."""
    return ",".join(f'"unknown{number:06}":0' for number in range(count))


async def names_unknown_fields(me: Intruder) -> str:
    """A hundred thousand of them in a body of 1.7 MB."""
    return await me.post(SPEECH, f'{{"input":"Hello.","voice":"alloy",{unknown(100_000)}}}'.encode())


async def names_unknown_fields_to_sockets(me: Intruder) -> str:
    """Six thousand in a message, the first of three kinds of socket."""
    speak = f'{{"type":"speak","input":"Hello.","voice":"alloy","max_new_tokens":2,{unknown(6000)}}}'
    told = [await me.say(f"{SPEECH}/ws", [speak])]
    told.append(await me.say(f"{SPEECH}/stream", [f'{{"type":"session.config","voice":"alloy",{unknown(6000)}}}']))
    start = f'{{"type":"request.start","voice":"alloy",{unknown(6000)}}}'
    told.append(await me.say(f"{SPEECH}/ws", [start], protocols=["nari.speech.v1"]))
    return max(told)


# --- 2: texts that take long to read ---


async def writes(me: Intruder, text: str) -> str:
    """One message with all of a text, as Deepgram's clients send a few words."""
    return await me.say(FLUX, [{"type": "Speak", "text": text}, {"type": "Flush"}], reads_s=0.2)


async def writes_an_hour_at_once(me: Intruder) -> str:
    """64,000 characters of words."""
    async with me.talking(FLUX) as talking:
        await talking.send_json({"type": "Speak", "text": "words and " * 6400})
        await talking.send_json({"type": "Flush"})
        await talking.receive(HELD_S)
        await asyncio.sleep(1.0)
        return "left" if not talking.closed else f"closed {talking.close_code}"


async def opens_brackets(me: Intruder) -> str:
    """A link that does not end."""
    return await writes(me, "[" + "words and " * 6000)


async def writes_bullets(me: Intruder) -> str:
    return await writes(me, "- word\n" * 9000)


async def opens_tags(me: Intruder) -> str:
    """40,000 characters of what may become markup: longer than any text may be."""
    return await me.post(SPEECH, {**SHORT, "input": "<" + "a" * 40_000})


async def opens_tags_within_limits(me: Intruder) -> str:
    """The same, as long as a text may be, so that all of it is read."""
    return await me.post(SPEECH, {**SHORT, "input": "<" + "a" * 4000})


async def explains_a_pronunciation(me: Intruder) -> str:
    """Deepgram's form of one, two megabytes of it, without an end."""
    return await me.post("/v1/speak", {"text": '{"word":"' + "a" * 2 * MIB})


# --- 3: answers that are kept until they are whole ---


async def asks_for_a_batch(me: Intruder) -> str:
    """64 slow utterances as large samples, in 400 bytes."""
    fields = {name: value for name, value in LOUD.items() if name != "input"}
    return await me.post(f"{SPEECH}/batch", {**fields, "items": [{"input": "On."}] * 64})


async def asks_for_a_whole_answer(me: Intruder) -> str:
    """One that is as large as can be."""
    return await me.post(SPEECH, {**LOUD, "stream": False})


# --- 4: what a socket keeps ---


async def appends_and_never_commits(me: Intruder) -> str:
    """170 MB in 1,500 messages."""
    append = json.dumps({"type": "input_text_buffer.append", "text": "words and " * 11_000})
    settings = {"type": "session.update", "session": {"mode": "commit"}}
    return await me.say(DASHSCOPE, [json.dumps(settings), *[append] * 1500])


async def opens_contexts_with_long_names(me: Intruder) -> str:
    """A thousand of Cartesia's, most of which are too many, each with a name of 100 KB."""
    names = (f"{number}" + "x" * 100_000 for number in range(1000))
    voice = {"voice": {"mode": "id", "id": "ryan"}, "transcript": "", "continue": True}
    return await me.say("/tts/websocket", ({"context_id": name, **voice} for name in names), reads_s=0.1)


async def updates_with_unknown_settings(me: Intruder) -> str:
    """A hundred times 100 KB, each under other names."""
    updates = ({"type": "session.update", "session": {f"unknown{n}": "x" * 100_000}} for n in range(100))
    return await me.say(DASHSCOPE, updates)


async def names_a_recording(me: Intruder) -> str:
    """Messages of eight megabytes, where only those with a recording to clone may be as large."""
    message = json.dumps({"type": "Speak", "ref_audio": "", "text": "words and " * (8 * MIB // 10)})
    return await me.say(FLUX, [message] * 4)


async def pings_and_reads_nothing(me: Intruder) -> str:
    pings = frame(b"x" * 125, opcode=9) * 500
    async with me.raw() as raw:
        await upgrade(raw, me.key)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HELD_S):
                for _ in range(3000):
                    await sent(raw, pings)
    return "left"


# --- 5: large bodies and messages that do not come ---

RECORDING = json.dumps({**SHORT, "ref_audio": "data:audio/wav;base64," + "A" * 200 * KIB}).encode()


async def stalls_its_recordings(me: Intruder) -> str:
    """Three bodies of 200 KB, the rest of which does not come: another client's recording is taken in all the same."""
    async with contextlib.AsyncExitStack() as opened:
        for _ in range(3):
            raw = await opened.enter_async_context(me.raw())
            await sent(raw, me.request(b'{"ref_audio":"' + b"A" * 200 * KIB, announced=8 * MIB))
        await asyncio.sleep(1.0)
        try:
            async with asyncio.timeout(OTHERS_S):
                status = await me.polite.post(SPEECH, RECORDING)  # 400: the loaded model clones no voices
        except TimeoutError:
            raise Broken(f"stalled bodies of one client keep another's recording out for {OTHERS_S:g} s") from None
    if status == "429":
        raise Broken("stalled bodies of one client have another's recording refused")
    return status


async def stalls_its_messages(me: Intruder) -> str:
    """The same with messages of sockets, as many megabytes as all may hold together."""
    async with contextlib.AsyncExitStack() as opened:
        for _ in range(3):
            raw = await opened.enter_async_context(me.raw())
            await upgrade(raw, me.key)
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(4.0):
                    await sent(raw, frame(b" " * (16 * MIB - 1), final=False)[: 31 * MIB // 2])
        message = f'{{"type":"speak","input":"Hello.","voice":"alloy","ref_audio":"{"A" * 2 * MIB}"}}'
        status = await me.polite.say(f"{SPEECH}/ws", [message])
    if status == "closed 1013":
        raise Broken("stalled messages of one client have another's recording refused")
    return status


# --- 6 and 7: readers ---


async def reads_nothing(me: Intruder) -> str:
    """As many streams as the server has room for, none of which is read: 25 s later it speaks to others again."""
    async with contextlib.AsyncExitStack() as opened:
        held, until_s = 0, asyncio.get_running_loop().time() + FILL_S
        while held < STREAMS and asyncio.get_running_loop().time() < until_s:
            raw = await opened.enter_async_context(replace(me, address=f"127.0.0.{210 + held % 8}").raw())
            held += await begins(raw, me, is_socket=held % 2 == 1)
        await asyncio.sleep(FREED_S)
        status = await me.polite.post(SPEECH, SHORT)
    if status != "200":
        raise Broken(f"{held} readers of nothing hold every place for over {FREED_S:g} s: another client gets {status}")
    return status if held == STREAMS else f"only {held} places taken"


async def begins(raw: socket.socket, me: Intruder, *, is_socket: bool) -> bool:
    """Whether the server begins to speak; little more than that is read."""
    if is_socket:
        speak = frame(json.dumps({**LOUD, "type": "speak", "response_format": "pcm"}).encode())
        await upgrade(raw, me.key)
        await sent(raw, speak)
    else:
        await sent(raw, me.request(json.dumps(LOUD).encode()))
    answer = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(2.0):
            while data := await asyncio.get_running_loop().sock_recv(raw, 512):
                answer += data
                if b" 200 OK" in answer or b'"started"' in answer:
                    return True
                if b" 429 " in answer or b'"error"' in answer:
                    break
    raw.close()
    await asyncio.sleep(0.1)
    return False


async def pauses(me: Intruder) -> str:
    """No attack: a player that is paused, over four kinds of socket. Each goes on afterwards."""
    text = "Good morning, and thank you for calling. " * 5
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    turns: dict[str, list[Json]] = {
        f"{SPEECH}/ws": [{"type": "speak", **ENDLESS}],
        FLUX: [{"type": "Speak", "text": text}, {"type": "Flush"}],
        CONTEXTS: [{"text": text, "context_id": "one"}, {"text": "", "flush": True, "context_id": "one"}],
        "/v1/realtime?model=gpt-realtime": [{"type": "response.create", "response": {"input": [item]}}],
    }

    async def pause(path: str) -> str:
        async with me.talking(path, buffer=4096) as talking:
            for message in turns[path]:
                await talking.send_json(message)
            await asyncio.sleep(PAUSE_S)
            return await rest(talking, 3.0)

    ends = await asyncio.gather(*map(pause, turns))
    if ended := [f"{path} {end}" for path, end in zip(turns, ends, strict=True) if end != "open"]:
        raise Broken(f"a client that reads nothing for {PAUSE_S:g} s: {'; '.join(ended)}")
    return "open"


# --- 8: addresses ---


async def has_many_addresses(me: Intruder) -> str:
    """More requests than an address may make, each from another one of the same /64."""
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
    """Its "NUMBER" is that, however little it is one."""
    return json.dumps(body).replace('"NUMBER"', number).encode()


async def asks_for_no_number(me: Intruder) -> str:
    """One of all numbers that are none, or too large, in one of all places for one."""
    chance = random.Random()
    bodies: dict[str, Json] = {
        SPEECH: {**SHORT, chance.choice(["speed", "seed", "sample_rate", "temperature", "top_k"]): "NUMBER"},
        REST: {
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
    """Deepgram Flux: what comes behind it is still answered."""
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


# --- 14: halves ---

LIVE: dict[str, tuple[list[Json], Json]] = {
    FLUX: ([], {"type": "Speak", "text": "TEXT"}),
    "/v1/speak?model=aura-2-ryan-en": ([], {"type": "Speak", "text": "TEXT"}),
    CONTEXTS: ([], {"context_id": "one", "text": "TEXT"}),
    "/tts/websocket": ([], {"context_id": "one", "voice": "ryan", "continue": True, "transcript": "TEXT"}),
    DASHSCOPE: ([], {"type": "input_text_buffer.append", "text": "TEXT"}),
    f"{SPEECH}/stream": ([{"type": "session.config", "voice": "ryan"}], {"type": "input.text", "text": "TEXT"}),
}


async def cuts_characters(me: Intruder) -> str:
    """A message that ends with half a surrogate pair, the other half in the next: no word of them is refused."""
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


# --- 18: anything, everywhere ---

TEXTS = tuple(
    (piece * (64 * KIB))[: 64 * KIB - 1]
    for piece in ("<", "<a ", "[", "[a](", "- word\n", "* ", "\ud83d", "\ude42", '{"word":"', "a", "a ", "1", ".", "'")
)


def bent(value: object, chance: random.Random) -> object:
    """A message or body in which texts and numbers are what they should not be."""
    match value:
        case "TEXT":
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
    """As JSON, and as what is none."""
    return re.sub(r'"@([^"@]*)@"', r"\1", json.dumps(value))


async def sends_anything(me: Intruder) -> str:
    """To any dialect: its own messages with numbers that are none, and 64 KB of what is slow to read."""
    chance = random.Random()
    if chance.random() < 0.5:
        path, body = chance.choice([*BODIES.items()])
        return await me.post(path, spelled(bent(body, chance)).encode())
    kind = chance.choice([*SOCKETS.values()])
    query = {name: chance.choice(NUMBERS) if value[0].isdigit() else value for name, value in kind.query.items()}
    chosen = kind.query if chance.random() < 0.7 else query
    messages = [spelled(bent(message, chance)) for message in chance.choices([*kind.messages], k=5)]
    path = f"{kind.path}?{'&'.join(f'{name}={value}' for name, value in chosen.items())}"
    return await me.say(path, messages, reads_s=0.2, protocols=kind.protocols)


Act = Callable[[Intruder], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Attack:
    """A row of the table. An intruder does it again and again, for `window_s`, beside `many - 1` others."""

    name: str
    entry: int  # of the list of harms in docs/security.md; 0: what clients do in every hour of a public server
    act: Act
    many: int = 2
    window_s: float = 6.0
    takes_every_place: bool = False  # listeners may be refused: the act looks for how long
    is_beside: bool = False  # means well, and goes on beside all others
    gets: str = ""  # the only status that it may get


ATTACKS: tuple[Attack, ...] = (
    Attack("leaves", 0, leaves),
    Attack("closes its half", 0, closes_its_half, window_s=2),
    Attack("ends its body early", 0, ends_its_body_early, window_s=2),
    Attack("never ends its body", 0, never_ends_its_body, many=6, window_s=2),
    Attack("sends garbage", 0, sends_garbage, window_s=2, gets="400"),
    Attack("sends no JSON", 0, sends_no_json, window_s=2, gets="400"),
    Attack("guesses keys", 0, guesses_keys, window_s=2, gets="401"),
    Attack("asks for nines", 0, asks_for_nines, window_s=2, gets="400"),
    Attack("reads slowly", 0, reads_slowly, many=4),
    Attack("messages unfinished", 0, leaves_messages_unfinished, many=1),
    Attack("unknown fields", 1, names_unknown_fields, many=1, window_s=12),
    Attack("unknown fields to sockets", 1, names_unknown_fields_to_sockets),
    Attack("an hour of text at once", 2, writes_an_hour_at_once, many=1, window_s=8),
    Attack("open brackets", 2, opens_brackets, many=1),
    Attack("bullets", 2, writes_bullets, many=1),
    Attack("tags, too long", 2, opens_tags, many=1, window_s=8, gets="400"),
    Attack("tags, as long as may be", 2, opens_tags_within_limits, many=1),
    Attack("a pronunciation", 2, explains_a_pronunciation, many=1),
    Attack("a batch", 3, asks_for_a_batch, many=2, window_s=12),
    Attack("a whole answer", 3, asks_for_a_whole_answer, many=3, window_s=8),
    Attack("never commits", 4, appends_and_never_commits, many=1, window_s=10),
    Attack("contexts with long names", 4, opens_contexts_with_long_names, many=1, window_s=10),
    Attack("unknown settings", 4, updates_with_unknown_settings, many=1),
    Attack("names a recording", 4, names_a_recording, many=1),
    Attack("pings and reads nothing", 4, pings_and_reads_nothing, many=1, window_s=13),
    Attack("stalls its recordings", 5, stalls_its_recordings, many=1, window_s=8),
    Attack("stalls its messages", 5, stalls_its_messages, many=1, window_s=8),
    Attack("reads nothing", 6, reads_nothing, many=1, window_s=FILL_S + FREED_S + 7, takes_every_place=True),
    Attack("pauses its player", 7, pauses, many=1, window_s=PAUSE_S + 15, is_beside=True),
    Attack("many addresses", 8, has_many_addresses, many=1, window_s=8),
    Attack("no number", 12, asks_for_no_number, window_s=10),
    Attack("interrupts at no number", 12, interrupts_at_no_number, many=1),
    Attack("half a character", 14, cuts_characters),
    Attack("anything", 18, sends_anything, many=4, window_s=20),
)
HABITS = tuple(attack for attack in ATTACKS if attack.entry == 0)


async def once(act: Act, me: Intruder) -> str:
    """What one act got; a limit that did not hold is told as "broken: ..."."""
    try:
        return await act(me)
    except Broken as error:
        return f"broken: {error}"
    except aiohttp.WSServerHandshakeError as error:
        return str(error.status)
    except (OSError, EOFError, TimeoutError, aiohttp.ClientError) as error:
        return type(error).__name__


def strike(attack: Attack, port: int, keys: tuple[str, str], within_s: float, many: int) -> Counter[str]:
    """What so many intruders get in that time, each of which does it again and again: a process of its own."""
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
        await asyncio.wait(cut, timeout=CUT_S)  # one that says goodbye to a server which does not listen is left
    for task in done:
        task.result()  # a fault of the act
    got["cut off"] = len(cut)
    return got


async def intrude(port: int, key: str, chance: random.Random) -> tuple[str, str]:
    """One habit of one hostile client: which, and what it got."""
    attack = chance.choice(HABITS)
    return attack.name, await once(attack.act, Intruder(port, key, f"127.0.0.{chance.randrange(200, 208)}"))

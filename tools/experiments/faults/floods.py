"""Attacks with too many, too large, incomplete or unread streams, bodies and messages."""

import asyncio
import contextlib
import json
import os
import socket
from dataclasses import replace
from functools import cache

from tools.experiments.faults.intruder import (
    CONTEXTS,
    DASHSCOPE,
    ENDLESS,
    FILL_S,
    FLUX,
    FREED_S,
    HELD_S,
    KIB,
    LOUD,
    MIB,
    OTHERS_S,
    PAUSE_S,
    SHORT,
    STREAMS,
    Broken,
    Intruder,
    Json,
    first_line,
    rest,
    sent,
    upgrade,
)
from tools.suites.raw import SPEECH, frame

# --- normal behaviour of clients on a public server ---


async def leaves(me: Intruder) -> str:
    """Request minutes of speech, and disconnect after the first audio."""
    async with me.http() as http, http.post(SPEECH, json=ENDLESS) as answer:
        await answer.content.readany()
        return str(answer.status)


async def sends_a_body(me: Intruder, body: bytes, *, announced: int | None = None, closes: bool) -> str:
    """Send a body, optionally with a larger `Content-Length`, and optionally close the sending side."""
    async with me.raw() as raw:
        await sent(raw, me.request(body, announced=announced))
        if closes:
            raw.shutdown(socket.SHUT_WR)
        return await first_line(raw)


async def sends_garbage(me: Intruder) -> str:
    async with me.raw() as raw:
        await sent(raw, os.urandom(2048) + b"\r\n\r\n")
        return await first_line(raw)


async def sends_no_json(me: Intruder) -> str:
    """Send a request whose body is not JSON."""
    return await me.post(SPEECH, os.urandom(512))


async def guesses_keys(me: Intruder) -> str:
    return await replace(me, key=f"{me.key[:-4]}nope").post(SPEECH, SHORT)


async def asks_for(me: Intruder, text: str) -> str:
    """Request two frames of any text."""
    return await me.post(SPEECH, {**SHORT, "input": text})


async def reads_slowly(me: Intruder) -> str:
    """Read an endless utterance slowly, then disconnect."""
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
    """Send a megabyte of an incomplete message on each of ten sockets."""
    async with contextlib.AsyncExitStack() as opened:
        for _ in range(10):
            raw = await opened.enter_async_context(me.raw())
            await upgrade(raw, me.key)
            await sent(raw, frame(b" " * MIB, final=False))
        await asyncio.sleep(HELD_S / 2)
    return "held"


# --- 1: unknown fields ---


@cache
def unknown(count: int) -> str:
    """Return the inside of a JSON object with `count` unknown fields."""
    return ",".join(f'"unknown{number:06}":0' for number in range(count))


async def names_unknown_fields(me: Intruder) -> str:
    """Send a hundred thousand unknown fields in a body of 1.7 MB."""
    return await me.post(SPEECH, f'{{"input":"Hello.","voice":"alloy",{unknown(100_000)}}}'.encode())


async def names_unknown_fields_to_sockets(me: Intruder) -> str:
    """Send six thousand unknown fields in the first message to three kinds of sockets."""
    speak = f'{{"type":"speak","input":"Hello.","voice":"alloy","max_new_tokens":2,{unknown(6000)}}}'
    told = [await me.say(f"{SPEECH}/ws", [speak])]
    told.append(await me.say(f"{SPEECH}/stream", [f'{{"type":"session.config","voice":"alloy",{unknown(6000)}}}']))
    start = f'{{"type":"request.start","voice":"alloy",{unknown(6000)}}}'
    told.append(await me.say(f"{SPEECH}/ws", [start], protocols=["nari.speech.v1"]))
    return max(told)


# --- 2: texts that are slow to parse ---


async def writes(me: Intruder, text: str) -> str:
    """Send the complete text in one Deepgram message, which usually contains a few words."""
    return await me.say(FLUX, [{"type": "Speak", "text": text}, {"type": "Flush"}], reads_s=0.2)


async def writes_an_hour_at_once(me: Intruder) -> str:
    """Send 64,000 characters of words."""
    async with me.talking(FLUX) as talking:
        await talking.send_json({"type": "Speak", "text": "words and " * 6400})
        await talking.send_json({"type": "Flush"})
        await talking.receive(HELD_S)
        await asyncio.sleep(1.0)
        return "left" if not talking.closed else f"closed {talking.close_code}"


async def explains_a_pronunciation(me: Intruder) -> str:
    """Send two megabytes of Deepgram's pronunciation markup without an end."""
    return await me.post("/v1/speak", {"text": '{"word":"' + "a" * 2 * MIB})


# --- 3: responses that are buffered until complete ---


async def asks_for_a_batch(me: Intruder) -> str:
    """Request 64 slow utterances as large samples with a body of 400 bytes."""
    fields = {name: value for name, value in LOUD.items() if name != "input"}
    return await me.post(f"{SPEECH}/batch", {**fields, "items": [{"input": "On."}] * 64})


async def asks_for_a_whole_answer(me: Intruder) -> str:
    """Request the largest possible complete response."""
    return await me.post(SPEECH, {**LOUD, "stream": False})


# --- 4: state of a socket ---


async def appends_and_never_commits(me: Intruder) -> str:
    """Send 170 MB in 1,500 messages."""
    append = json.dumps({"type": "input_text_buffer.append", "text": "words and " * 11_000})
    settings = {"type": "session.update", "session": {"mode": "commit"}}
    return await me.say(DASHSCOPE, [json.dumps(settings), *[append] * 1500])


async def opens_contexts_with_long_names(me: Intruder) -> str:
    """Open a thousand Cartesia contexts with names of 100 KB, far more than the limit."""
    names = (f"{number}" + "x" * 100_000 for number in range(1000))
    voice = {"voice": {"mode": "id", "id": "ryan"}, "transcript": "", "continue": True}
    return await me.say("/tts/websocket", ({"context_id": name, **voice} for name in names), reads_s=0.1)


async def updates_with_unknown_settings(me: Intruder) -> str:
    """Send a hundred updates of 100 KB with different unknown settings."""
    updates = ({"type": "session.update", "session": {f"unknown{n}": "x" * 100_000}} for n in range(100))
    return await me.say(DASHSCOPE, updates)


async def names_a_recording(me: Intruder) -> str:
    """Send messages of eight megabytes, a size that is only allowed for recordings to clone."""
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


# --- 5: large bodies and messages that stall ---

RECORDING = json.dumps({**SHORT, "ref_audio": "data:audio/wav;base64," + "A" * 200 * KIB}).encode()


async def stalls_its_recordings(me: Intruder) -> str:
    """Stall three bodies of 200 KB, and check that the server still accepts another client's recording."""
    async with contextlib.AsyncExitStack() as opened:
        for _ in range(3):
            raw = await opened.enter_async_context(me.raw())
            await sent(raw, me.request(b'{"ref_audio":"' + b"A" * 200 * KIB, announced=8 * MIB))
        await asyncio.sleep(1.0)
        try:
            async with asyncio.timeout(OTHERS_S):
                status = await me.polite.post(SPEECH, RECORDING)  # 400, because the loaded model does not clone voices
        except TimeoutError:
            raise Broken(f"stalled bodies of one client keep another's recording out for {OTHERS_S:g} s") from None
    if status == "429":
        raise Broken("stalled bodies of one client have another's recording refused")
    return status


async def stalls_its_messages(me: Intruder) -> str:
    """Stall socket messages up to the total memory limit, and check that the server still accepts another recording."""
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


# --- 6 and 7: clients that do not read ---


async def reads_nothing(me: Intruder) -> str:
    """Open as many unread streams as the server admits, and check that it serves other clients again after 25 s."""
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
    """Return whether the server starts to send audio. Reads little more than that."""
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
    """Pause playback on four kinds of sockets, which is not an attack, and check that each stream continues."""
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

"""A caller of docs/examples/pipecat_agent.py over its WebSocket: `python example_pipecat.py order.json`.

The caller says two things, the second one into the agent's first answer.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import websockets
from common import until, write_wav
from pipecat.frames.frames import InputAudioRawFrame, InterruptionFrame, OutputAudioRawFrame
from pipecat.serializers.protobuf import ProtobufFrameSerializer

ORDER = json.loads(Path(sys.argv[1]).read_text())
FOLDER = Path(ORDER["folder"])
RATE, FRAME_S = 16000, 0.02
FRAME = int(RATE * FRAME_S)
# A caller's frames have the agent's types turned around.
SERIALIZER = ProtobufFrameSerializer()
SERIALIZER.SERIALIZABLE_TYPES = {**SERIALIZER.SERIALIZABLE_TYPES, InputAudioRawFrame: "audio"}
SERIALIZER.DESERIALIZABLE_FIELDS = {**SERIALIZER.DESERIALIZABLE_FIELDS, "audio": OutputAudioRawFrame}


class Caller:
    def __init__(self, socket: websockets.ClientConnection) -> None:
        self.socket = socket
        self.to_say = bytearray()
        self.heard = [bytearray()]  # before and after each interruption
        self.last_s = 0.0  # when audio came last

    async def talk(self) -> None:
        """Silence, and what there is to say, 20 ms at a time."""
        due_s = time.perf_counter()
        while True:
            due_s += FRAME_S
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            data = bytes(self.to_say[: 2 * FRAME]).ljust(2 * FRAME, b"\0")
            del self.to_say[: 2 * FRAME]
            await self.socket.send(await SERIALIZER.serialize(InputAudioRawFrame(data, RATE, 1)))

    async def listen(self) -> None:
        async for message in self.socket:
            frame = await SERIALIZER.deserialize(message)
            if isinstance(frame, OutputAudioRawFrame):
                assert frame.sample_rate == 24000
                if any(frame.audio):  # silence between two answers is sent too
                    self.heard[-1] += frame.audio
                    self.last_s = time.perf_counter()
            elif isinstance(frame, InterruptionFrame) and self.heard[-1]:
                self.heard.append(bytearray())


async def main() -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                socket = await websockets.connect(f"ws://127.0.0.1:{ORDER['port']}")
                break
            except OSError:
                await asyncio.sleep(0.2)
    said = [Path(file).read_bytes() for file in ORDER["said"]]
    caller = Caller(socket)
    tasks = [asyncio.create_task(each) for each in (caller.talk(), caller.listen())]
    caller.to_say += said[0]
    await until(lambda: len(caller.heard[-1]) > 1.5 * 48000, "the story is heard")
    story = len(caller.heard) - 1
    caller.to_say += said[1]
    began_s = time.perf_counter()
    await until(lambda: len(caller.heard) > story + 1, "the caller interrupts")
    silence_s = caller.last_s - began_s
    await until(lambda: len(caller.heard[-1]) > 48000, "the answer begins")
    await until(lambda: time.perf_counter() - caller.last_s > 1.5, "the answer is heard")
    for task in tasks:
        task.cancel()
    await socket.close()
    for number, pcm in enumerate(caller.heard[story:]):
        write_wav(FOLDER / f"answer-{number}.wav", pcm, 24000)
    (FOLDER / "report.json").write_text(json.dumps({"cut": [True, False], "silence_s": silence_s}))


asyncio.run(main())

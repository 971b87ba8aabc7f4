"""docs/examples/livekit_agent.py with a microphone and a loudspeaker that play in real time, without a LiveKit server.

`python example_livekit.py order.json`: a caller says two things, the second one into the agent's first answer.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import aiohttp
from common import until, write_wav
from livekit import rtc
from livekit.agents.voice.io import AudioInput, AudioOutput, AudioOutputCapabilities
from livekit.agents.voice.transcription import TranscriptSynchronizer

ORDER = json.loads(Path(sys.argv[1]).read_text())
FOLDER = Path(ORDER["folder"])
RATE, FRAME_S = 16000, 0.02
FRAME = int(RATE * FRAME_S)


class Microphone(AudioInput):
    """Silence, and what the caller says, 20 ms at a time."""

    def __init__(self) -> None:
        super().__init__(label="microphone")
        self.pcm = bytearray()
        self._due_s = time.perf_counter()

    async def __anext__(self) -> rtc.AudioFrame:
        self._due_s += FRAME_S
        await asyncio.sleep(max(0.0, self._due_s - time.perf_counter()))
        data = bytes(self.pcm[: 2 * FRAME]).ljust(2 * FRAME, b"\0")
        del self.pcm[: 2 * FRAME]
        return rtc.AudioFrame(data, RATE, 1, FRAME)


class Loudspeaker(AudioOutput):
    """Plays each answer from its first audio on; an interrupted one ends where it was."""

    def __init__(self) -> None:
        super().__init__(label="loudspeaker", capabilities=AudioOutputCapabilities(pause=False), sample_rate=24000)
        self.answers: list[tuple[bytes, bool]] = []  # what was heard, and whether it was cut off
        self.began_s = 0.0  # of the answer that plays
        self._pcm = bytearray()
        self._ending: asyncio.Task[None] | None = None

    @property
    def played_s(self) -> float:
        return min(time.perf_counter() - self.began_s, len(self._pcm) / 48000) if self._pcm else 0.0

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        if not self._pcm:
            self.began_s = time.perf_counter()
            self.on_playback_started(created_at=time.time())
        self._pcm += frame.data

    def flush(self) -> None:
        super().flush()
        if self._pcm:
            self._ending = asyncio.create_task(self._play_to_the_end())

    async def _play_to_the_end(self) -> None:
        await asyncio.sleep(max(0.0, len(self._pcm) / 48000 - (time.perf_counter() - self.began_s)))
        self._end(interrupted=False)

    def clear_buffer(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        if self._pcm:
            self._end(interrupted=True)

    def _end(self, *, interrupted: bool) -> None:
        played_s = self.played_s
        self.answers.append((bytes(self._pcm[: 2 * int(24000 * played_s)]), interrupted))
        self._pcm, self._ending = bytearray(), None
        self.on_playback_finished(playback_position=played_s, interrupted=interrupted)


async def main() -> None:
    sys.path.insert(0, ORDER["examples"])
    import livekit_agent

    said = [Path(file).read_bytes() for file in ORDER["said"]]
    microphone, loudspeaker = Microphone(), Loudspeaker()
    async with aiohttp.ClientSession() as http:
        session = livekit_agent.agent_session(http)
        # As a room wires them: the text that belongs to what was played is known at an interruption.
        heard = TranscriptSynchronizer(next_in_chain_audio=loudspeaker, next_in_chain_text=None)
        session.input.audio = microphone
        session.output.audio, session.output.transcription = heard.audio_output, heard.text_output
        await session.start(livekit_agent.agent(), record=False)
        microphone.pcm += said[0]
        await until(lambda: loudspeaker.played_s > 1.5, "the story is heard")
        microphone.pcm += said[1]
        began_s = time.perf_counter()
        await until(lambda: loudspeaker.answers, "the caller interrupts")
        silence_s = time.perf_counter() - began_s
        await until(lambda: len(loudspeaker.answers) > 1, "the answer is heard")
        await session.aclose()
    for number, (pcm, _) in enumerate(loudspeaker.answers):
        write_wav(FOLDER / f"answer-{number}.wav", pcm, 24000)
    cut = [was_cut for _, was_cut in loudspeaker.answers]
    (FOLDER / "report.json").write_text(json.dumps({"cut": cut, "silence_s": silence_s}))


asyncio.run(main())

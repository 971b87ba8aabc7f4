"""Run a session in which a server speaks texts and a judge rates the speech. A log file makes it resumable."""

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import aiohttp

from talkray_tools.judge import Judge, Judged
from talkray_tools.spoken_texts import Text
from talkray_tools.ways import Asked, Json, UtteranceFailed, Way

logger = logging.getLogger(__name__)

AT_ONCE = 6  # texts requested concurrently
_PROGRESS_S = 5.0


class Log:
    """Judged utterances, appended to a file so that each is judged only once."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.judged = [Judged(**json.loads(line)) for line in lines if line.endswith("}")]
        self._known = {each.key for each in self.judged if not each.failed}
        self.judged = [each for each in self.judged if not each.failed]  # retry failed utterances

    def has(self, key: tuple[str, str, str, int]) -> bool:
        return key in self._known

    def add(self, judged: Judged) -> None:
        self.judged.append(judged)
        self._known.add(judged.key)
        with self._file.open("a", encoding="utf-8") as out:
            fields = {name: getattr(judged, name) for name in Judged.__slots__}
            out.write(json.dumps(fields, ensure_ascii=False) + "\n")


class ListeningSession:
    """Session that requests speech from one server at a time and judges it in parallel."""

    def __init__(self, judge: Judge, log: Log, fields: Json) -> None:
        """Set the judge, the log, and the `fields` sent with every request."""
        self._judge, self._log, self._fields = judge, log, fields
        self._listening = ThreadPoolExecutor(1)
        self._began_s = self._said_s = time.monotonic()

    async def hear(
        self, http: aiohttp.ClientSession, way: Way, voice: str, wanted: Sequence[Text], *, at_once: int = AT_ONCE
    ) -> None:
        """Request and judge every text that is not in the log."""
        missing = [text for text in wanted if not self._log.has((way.name, voice, text.kind, text.number))]
        several = asyncio.Semaphore(at_once)
        self._say(f"{way.name}, {voice}: {len(missing)} texts", now=bool(missing))
        await asyncio.gather(*(self._hear_one(http, way, voice, text, several) for text in missing))

    async def _hear_one(
        self, http: aiohttp.ClientSession, way: Way, voice: str, text: Text, several: asyncio.Semaphore
    ) -> None:
        key = (way.name, voice, text.kind, text.number)
        asked = self._asked(text, voice, text.number + 1 if way.seed is None else way.seed)
        loop = asyncio.get_running_loop()
        try:
            async with several:
                audio = await way.listen(http, asked)
                converted = None
                if way.is_compared and way.listen is not way.same_speech:
                    said = await way.same_speech(http, asked)
                    converted = await loop.run_in_executor(None, way.convert, said)
            judged = await loop.run_in_executor(self._listening, self._judge.judge, key, text, audio, converted)
            judged = replace(judged, reason=str(asked.told.get("finish_reason") or ""))
        except (UtteranceFailed, TimeoutError, aiohttp.ClientError) as error:
            judged = self._judge.failed(key, text.spoken, str(error) or type(error).__name__)
            self._say(f"{way.name}, {voice}, {text.kind} {text.number}: {judged.failed}", now=True)
        self._log.add(judged)
        same = [each for each in self._log.judged if each.key[:2] == key[:2]]
        wrong = sum(next(iter(each.errors.values()), 0) for each in same) / max(1, sum(each.words for each in same))
        self._say(f"{way.name}, {voice}: {len(same)} heard, {wrong:.1%} word errors")

    def _asked(self, text: Text, voice: str, seed: int) -> Asked:
        return Asked(text.written, seed, self._fields | ({"voice": voice} if voice else {}))

    def _say(self, line: str, *, now: bool = False) -> None:
        moment_s = time.monotonic()
        if now or moment_s - self._said_s >= _PROGRESS_S:
            self._said_s = moment_s
            logger.info("[%4.0f s] %s", moment_s - self._began_s, line)


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session with timeouts long enough for a slow server. Sends TALKRAY_API_KEY if it is set."""
    key = os.environ.get("TALKRAY_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, timeout=timeout, headers=headers) as http:
        yield http


async def builtin_voices(http: aiohttp.ClientSession) -> list[str]:
    """Return the checkpoint's built-in voices, or one empty name if there are none."""
    async with http.get("/v1/audio/voices") as answer:
        answer.raise_for_status()
        known = (await answer.json())["voices"]
    return [voice["id"] for voice in known if not voice.get("alias_of") and voice.get("type") != "alias"] or [""]

"""Check a running server with requests from other services' clients, and print the client settings for it."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from deployments.errors import TalkrayError
from serve_app.api.routing import dialects_of
from serve_app.extension import Sample
from serve_app.extensions import load_extensions

_TEXT = "Hello."
_BOUND_S = 30.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Outcome of one request."""

    dialect: str
    sample: Sample
    problem: str | None
    first_audio_s: float = 0.0

    def lines(self) -> tuple[str, ...]:
        if self.problem is not None:
            return (f"FAILED  {self.dialect}: {self.problem}",)
        first = f"ok      {self.dialect}: first audio after {self.first_audio_s * 1000:.0f} ms"
        return (first, *(f"    {line}" for line in self.sample.clients))


async def check(url: str, *, key: str | None) -> AsyncIterator[CheckResult]:
    """Try every dialect in turn. Raises TalkrayError if the server does not respond."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=_BOUND_S)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as http:
        try:
            async with http.get("/v1/audio/voices") as answer:
                voices = (await answer.json())["voices"]
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            raise TalkrayError(f"no Talkray server responds at {url}: {error or type(error).__name__}") from None
        voice = voices[0]["id"] if voices else "default"
        words = {"text": _TEXT, "voice": voice, "url": url, "sockets": "ws" + url.removeprefix("http")}
        for dialect in dialects_of(load_extensions()):
            if dialect.sample is not None:
                yield await _try(http, dialect.name, dialect.sample.filled(**words))


async def _try(http: aiohttp.ClientSession, dialect: str, sample: Sample) -> CheckResult:
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(_BOUND_S):
            problem = await (_post(http, sample) if sample.body is not None else _converse(http, sample))
    except (aiohttp.ClientError, TimeoutError) as error:
        return CheckResult(dialect, sample, f"{error or type(error).__name__}")
    return CheckResult(dialect, sample, problem, first_audio_s=time.perf_counter() - began_s)


async def _post(http: aiohttp.ClientSession, sample: Sample) -> str | None:
    """Return the problem, or None once audio has arrived."""
    async with http.post(sample.path, json=sample.body) as answer:
        if answer.status != 200:
            return f"{answer.status}: {await answer.text()}"
        return None if await answer.content.readany() else "the response has no audio"


async def _converse(http: aiohttp.ClientSession, sample: Sample) -> str | None:
    async with http.ws_connect(sample.path, protocols=sample.protocols) as socket:
        for message in sample.messages:
            await socket.send_json(message)
        async for received in socket:
            if received.type is aiohttp.WSMsgType.BINARY:
                return None
            fields: dict[str, Any] = received.json()
            if fields.get(sample.audio_field):
                return None
            if fields.get("error") or fields.get("type") in ("error", "Error"):
                return str(received.data)
        return f"closed with {socket.close_code} before any audio"

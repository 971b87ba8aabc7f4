"""Builds the API of a server with one model, for tests."""

from collections.abc import Callable, Mapping
from typing import Any

import httpx
from fastapi import FastAPI
from httpx import Response
from starlette.types import ASGIApp

from serve_app.api.application import create_api
from serve_app.api.request_record import RequestRecord
from serve_app.config import ApiSettings
from serve_app.extension import ExtensionState
from serve_app.speech.utterance_synthesizer import Synthesizer


class Kept(ExtensionState):
    """The extension `records` of a test, which keeps them itself."""

    def __init__(self, on_end: Callable[[RequestRecord], object]) -> None:
        self._on_end = on_end

    def receive(self, record: RequestRecord) -> None:
        self._on_end(record)


def one_api(
    synthesizer: Synthesizer,
    settings: ApiSettings,
    *,
    opened: Mapping[str, object] | None = None,
    on_end: Callable[[RequestRecord], object] | None = None,
    **more: Any,
) -> FastAPI:
    """As `create_api`, of one model. `on_end` gets the record of each request."""
    states = {**({} if on_end is None else {"records": Kept(on_end)}), **(opened or {})}
    return create_api({"": (synthesizer, settings.admission)}, settings, opened=states, **more)


def client_of(api: ASGIApp, headers: Mapping[str, str] | None = None, *, raises: bool = True) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(api, raise_app_exceptions=raises)
    return httpx.AsyncClient(transport=transport, base_url="http://talkray", headers=headers, timeout=30)


def client_for(synthesizer: Synthesizer, settings: ApiSettings | None = None) -> httpx.AsyncClient:
    """Of a server of one model."""
    return client_of(one_api(synthesizer, settings or ApiSettings()))


async def posted(synthesizer: Synthesizer, path: str, **request: Any) -> httpx.Response:
    """What a server of one model answers."""
    async with client_for(synthesizer) as client:
        return await client.post(path, **request)


def refusal(answer: Response, key: str = "param") -> tuple[int, object]:
    """The status of an answer, and the parameter (or the code) that its error names."""
    return answer.status_code, answer.json()["error"][key]

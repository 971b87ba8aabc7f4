from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from serve_app.api import create_api
from serve_app.api_settings import ApiSettings
from tests.serve_app.fake import FakeSynthesizer, utterance


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def synthesizer() -> FakeSynthesizer:
    return FakeSynthesizer(script=utterance())


@pytest.fixture
def api(synthesizer: FakeSynthesizer) -> FastAPI:
    return create_api(synthesizer, ApiSettings())


@pytest.fixture
async def client(api: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://talkray") as client:
        yield client

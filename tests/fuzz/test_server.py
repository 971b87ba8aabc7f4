"""The same against a running server: real proxy, real engine, and nothing left over afterwards."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
import requests
import schemathesis
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error

from deployments.config import CodecConfig, TalkerConfig
from deployments.random_checkpoint import Options, write_checkpoint
from deployments.released import SHAPES
from deployments.talker.kv_cache import KVCache
from deployments.talker.model.config import ModelConfig
from serve_app.api_settings import AdmissionSettings, ApiSettings
from serve_app.config import AppConfig
from serve_app.local_server import Address, running
from serve_app.ports import free_port
from tests.e2e.speech import PATH, Pools, endless, fetch
from tests.fuzz.conftest import NUM_CASES, SEED, Cases
from tests.fuzz.texts import body, text

pytestmark = [pytest.mark.anyio, pytest.mark.fuzz]

AT_ONCE = 8
BOUND_S = 120
# Short, so that a case takes milliseconds; long texts do not fit, which they have to be told before a byte is sent.
MAX_MODEL_LEN = 256
BLOCK = 16
FEW_FRAMES = 3
PATIENT = AdmissionSettings(max_line_s=1000, max_wait_s=1000)  # overload has tests of its own


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tiny model. Its KV cache holds one utterance of the greatest length and not a block more: a block that leaks
    is missed.
    """
    model: Path = tmp_path_factory.mktemp("fuzz") / "tiny"
    write_checkpoint(model, SHAPES["tiny-CustomVoice"], Options(dtype=torch.float32))
    block = BLOCK * KVCache.bytes_per_position(ModelConfig.load(model).talker, torch.float32)
    talker = TalkerConfig(
        max_num_seqs=AT_ONCE,
        max_num_waiting=2 * AT_ONCE,
        max_model_len=MAX_MODEL_LEN,
        kv_block_size=BLOCK,
        kv_cache_bytes=block * (MAX_MODEL_LEN // BLOCK + 1),  # one is nobody's
    )
    app = AppConfig(
        model=str(model), talker=talker, codec=CodecConfig(max_late_s=1000), api=ApiSettings(admission=PATIENT)
    )
    with running(app, Address("127.0.0.1", free_port()), print) as url:
        yield url


@pytest.fixture(scope="session")
async def http(server: str) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=BOUND_S)
    async with aiohttp.ClientSession(server, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        yield session


@pytest.fixture
async def pools(http: aiohttp.ClientSession) -> AsyncIterator[Pools]:
    """Whatever was sent: nothing runs any more, and one utterance gets every KV block."""
    pools = Pools()
    longest = len(await fetch(http, endless(seed=0)))
    yield pools
    await pools.reach(running=0)
    assert len(await fetch(http, endless(seed=0))) == longest
    await pools.reach(running=0)


def chances(name: str) -> Iterator[random.Random]:
    return (random.Random(f"{SEED}.{name}.{number}") for number in range(NUM_CASES))


async def test_texts(http: aiohttp.ClientSession, pools: Pools, cases: Cases) -> None:
    fields = {"voice": "alloy", "response_format": "pcm", "max_new_tokens": FEW_FRAMES}
    waiting = asyncio.Semaphore(AT_ONCE)

    async def ask(chance: random.Random) -> None:
        content = text(chance)[: chance.choice((40, 200, 5000))]
        async with waiting, http.post(PATH, data=body(chance, fields, content)) as answer:
            if chance.random() < 0.2:
                cases.count("left")
                return  # in the middle of it
            reply = await answer.read()
            cases.count(answer.status)
            assert answer.status < 500, reply
            assert answer.status == 200 or json.loads(reply)["error"]["message"]

    await asyncio.gather(*(ask(chance) for chance in chances("texts")))


async def test_sockets(http: aiohttp.ClientSession, pools: Pools, cases: Cases) -> None:
    waiting = asyncio.Semaphore(AT_ONCE)

    async def talk(chance: random.Random) -> None:
        async with waiting, http.ws_connect(f"{PATH}/ws") as socket:
            for _ in range(chance.randint(1, 8)):
                await _send_something(socket, chance)
            cases.count("sequence")
            if chance.random() < 0.5:
                return
            await socket.send_json({"type": "cancel"})
            async with asyncio.timeout(BOUND_S):
                while (message := await socket.receive()).type is not aiohttp.WSMsgType.CLOSED:
                    assert message.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT), message
                    if message.type is aiohttp.WSMsgType.TEXT:
                        event = message.json()
                        assert event.get("error", {}).get("type") != "server_error", event
                        if event["type"] == "cancelled":
                            return

    await asyncio.gather(*(talk(chance) for chance in chances("sockets")))


async def _send_something(socket: aiohttp.ClientWebSocketResponse, chance: random.Random) -> None:
    match chance.randrange(6):
        case 0 | 1:
            await socket.send_json({"type": "speak", **endless(), "input": "Go on."})
        case 2:
            await socket.send_json({"type": "cancel"})
        case 3:
            await socket.send_str(text(chance)[:2000].encode("utf-8", "replace").decode())
        case 4:
            await socket.send_bytes(chance.randbytes(chance.randint(0, 200)))
        case 5:
            await socket.send_json(
                {"type": "speak", "input": text(chance)[:500], "max_new_tokens": FEW_FRAMES, "voice": "alloy"}
            )


# What the document cannot say: which names are known. Most are spoken briefly, whatever else was asked.
KNOWN = st.fixed_dictionaries(
    {},
    optional={
        "input": st.sampled_from(["Hello.", "a" * 300, "One. " * 500]),
        "model": st.just("tts-1"),
        "voice": st.sampled_from(["alloy", "Vivian", {"id": "ash"}]),
        "language": st.just("auto"),
        "response_format": st.sampled_from(["pcm", "wav"]),
        "instructions": st.just("Softly."),
        "ref_audio": st.none(),
    },
)
BRIEF = {"max_new_tokens": FEW_FRAMES}


def test_requests_from_its_openapi_document(server: str, cases: Cases) -> None:
    schema = schemathesis.openapi.from_url(f"{server}/openapi.json")
    speech = next(operation.ok() for operation in schema.get_all_operations() if operation.ok().label == f"POST {PATH}")
    allowed, others = (speech.as_strategy(mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE))

    @settings(settings.get_profile("fuzz"), max_examples=NUM_CASES)
    @given(case=allowed | allowed | others, known=KNOWN, brief=st.sampled_from([BRIEF] * 19 + [{}]))
    def ask(case: Case, known: dict[str, object], brief: dict[str, object]) -> None:
        if isinstance(case.body, dict):
            case.body = {**case.body, **known, **brief}
        answer = case.call_and_validate(base_url=server, session=session, checks=[not_a_server_error], timeout=BOUND_S)
        cases.count(answer.status_code)
        if answer.status_code >= 400:
            assert set(json.loads(answer.content)["error"]) == {"message", "type", "param", "code"}

    with requests.Session() as session:
        ask()


async def test_bytes_that_are_no_http(server: str, pools: Pools, cases: Cases) -> None:
    """The proxy answers with a client's error or hangs up; the server stays."""
    address = urlsplit(server)
    good = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}"
    for chance in chances("bytes"):
        data = bytearray(good.encode())
        for _ in range(chance.randint(1, 5)):
            place = chance.randrange(len(data))
            data[place : place + chance.randint(0, 4)] = chance.randbytes(chance.randint(0, 6))
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(bytes(data))
        writer.write_eof()
        async with asyncio.timeout(BOUND_S):
            first = await reader.read(12)
        cases.count(first.decode("latin-1")[9:12] or "closed")
        assert first[9:10] != b"5", (data, first)
        writer.close()

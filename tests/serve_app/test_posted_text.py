import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from deployments import mailbox
from deployments.errors import InvalidRequest, Overloaded, ReplicaLost, TalkerLost
from deployments.mailbox import MailboxServer
from serve_app import posted_text
from serve_app.errors import Conflict, NotFound
from serve_app.posted_text import PostedTexts, draw_secret

pytestmark = pytest.mark.anyio

ADA, BOB = "key ada", "key bob"
FIELDS = {"speaker": "ryan", "x_vector_only_mode": False}


class Replicas:
    """Two ingress processes: what one keeps the other one is asked about."""

    def __init__(self) -> None:
        self.servers = [MailboxServer("127.0.0.1") for _ in range(2)]
        secret = draw_secret()
        self.keeper, self.other = (PostedTexts(server, secret) for server in self.servers)


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_DELAYS_S", (0.001,))


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    replicas = Replicas()
    yield replicas
    for server in replicas.servers:
        await server.aclose()


async def whole(parts: AsyncGenerator[str, None]) -> str:
    async with aclosing(parts):
        return "".join([part async for part in parts])


async def test_another_process_writes_and_hears(replicas: Replicas) -> None:
    post_id = await replicas.keeper.open(FIELDS, client=ADA)
    fields, parts = await replicas.other.claim(post_id, client=ADA)
    assert fields == FIELDS
    hearing = asyncio.create_task(whole(parts))
    for part in ("Hello ", "wörld 🙂", "\0\ud800 ", "x" * 60_000):
        await replicas.other.append(post_id, part, client=ADA)
    await replicas.keeper.finish(post_id, client=ADA)
    assert await hearing == "Hello wörld 🙂\0? " + "x" * 60_000


async def test_the_longest_text_in_one_part(replicas: Replicas) -> None:
    """However much its characters take in JSON."""
    for char in "\0🙂":
        post_id = await replicas.keeper.open({}, client=ADA)
        await replicas.other.append(post_id, char * (1 << 16), client=ADA)
        with pytest.raises(InvalidRequest, match="more than 65536 characters"):
            await replicas.other.append(post_id, "x", client=ADA)


async def test_one_claims(replicas: Replicas) -> None:
    post_id = await replicas.keeper.open({}, client=ADA)
    claims = [asyncio.create_task(each.claim(post_id, client=ADA)) for each in (replicas.keeper, replicas.other)]
    outcomes = await asyncio.gather(*claims, return_exceptions=True)
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 1


async def test_an_id_is_of_one_client_and_one_application(replicas: Replicas) -> None:
    post_id = await replicas.keeper.open({}, client=ADA)
    stranger = PostedTexts(replicas.servers[1], draw_secret())
    for texts, client in ((replicas.other, BOB), (stranger, ADA)):
        with pytest.raises(NotFound):
            await texts.finish(post_id, client=client)
    await replicas.other.finish(post_id, client=ADA)


async def test_a_text_that_nobody_hears_is_forgotten(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posted_text, "_IDLE_S", 0.05)
    post_id = await replicas.keeper.open(FIELDS, client=ADA)
    await until_forgotten(replicas.keeper)
    with pytest.raises(NotFound, match="no such stream"):
        await replicas.other.append(post_id, "Hello.", client=ADA)


async def test_a_text_that_nobody_writes_ends(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posted_text, "_IDLE_S", 0.3)
    monkeypatch.setattr(posted_text, "_READ_S", 0.3)
    post_id = await replicas.keeper.open(FIELDS, client=ADA)
    _, parts = await replicas.other.claim(post_id, client=ADA)
    await replicas.other.append(post_id, "Hello", client=ADA)
    assert await whole(parts) == "Hello"
    with pytest.raises(Conflict):
        await replicas.other.append(post_id, " there", client=ADA)
    await until_forgotten(replicas.keeper)


async def until_forgotten(texts: PostedTexts) -> None:
    async with asyncio.timeout(30):
        while texts._posts:  # noqa: ASYNC110, it tells nobody
            await asyncio.sleep(0.01)


async def test_so_many_may_wait_for_one_client(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posted_text, "MAX_UNHEARD", 2)
    [first, _] = [await replicas.keeper.open({}, client=ADA) for _ in range(2)]
    with pytest.raises(Overloaded, match="2 streams that nobody has asked to hear"):
        await replicas.keeper.open({}, client=ADA)
    await replicas.keeper.open({}, client=BOB)
    await replicas.other.claim(first, client=ADA)
    await replicas.keeper.open({}, client=ADA)


async def test_so_much_is_kept(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posted_text, "MAX_KEPT_BYTES", 20_000)
    recording = {"audio": "A" * 10_000}
    post_id = await replicas.keeper.open(recording, client=ADA)
    with pytest.raises(Overloaded, match="take 20000 bytes"):
        await replicas.keeper.open(recording, client=BOB)
    await replicas.other.claim(post_id, client=ADA)
    await replicas.keeper.open(recording, client=BOB)


async def test_the_process_that_keeps_a_text_dies(replicas: Replicas) -> None:
    post_id = await replicas.keeper.open({}, client=ADA)
    _, parts = await replicas.other.claim(post_id, client=ADA)
    await replicas.other.append(post_id, "Hello", client=ADA)
    assert await anext(parts) == "Hello"
    await replicas.servers[0].aclose()
    with pytest.raises(TalkerLost):
        await anext(parts)
    with pytest.raises(ReplicaLost, match="no answer about a text"):
        await replicas.other.append(post_id, " there", client=ADA)

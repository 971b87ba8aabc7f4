import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from deployments.errors import TalkerLost
from deployments.serving import mailbox
from deployments.serving.mailbox import read
from serve_app.extensions.live.mailbox_server import MailboxServer, WrittenText

pytestmark = pytest.mark.anyio


@pytest.fixture
async def server() -> AsyncIterator[MailboxServer]:
    server = MailboxServer("127.0.0.1")
    await server.start()
    yield server
    await server.aclose()


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_DELAYS_S", (0.001,))


async def test_parts_come_as_they_are_written_and_again_for_whoever_goes_on(server: MailboxServer) -> None:
    text = WrittenText()
    address = server.share("token", text)
    text.append("Hello ")
    async with aclosing(read(address)) as parts:
        assert await anext(parts) == "Hello "
        for part in ("wörld", " 🙂", "!" * 100_000):
            text.append(part)
            got = ""
            while len(got) < len(part):
                got += await anext(parts)
            assert got == part
        text.finish()
        assert [part async for part in parts] == []
    async with aclosing(read(address)) as parts:
        assert "".join([part async for part in parts]) == text.text


async def test_a_removed_text_is_read_no_more(server: MailboxServer) -> None:
    text = WrittenText()
    address = server.share("token", text)
    text.append("begun")
    async with aclosing(read(address)) as parts:
        assert await anext(parts) == "begun"
        server.remove("token")
        with pytest.raises(TalkerLost):
            await anext(parts)


@pytest.mark.parametrize(
    "sent", [b"", b"token\n", b"token -1\n", b"token x\n", b"\xff\xfe 0\n", b"x" * 10_000, b"token 5 tell\none"]
)
async def test_nonsense_gets_nothing(server: MailboxServer, sent: bytes) -> None:
    address = server.share("token", WrittenText())
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(sent)
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()


async def test_a_server_that_closes_lets_its_readers_go(server: MailboxServer) -> None:
    text = WrittenText()
    text.append("begun")
    async with aclosing(read(server.share("token", text))) as parts:
        assert await anext(parts) == "begun"
        await server.aclose()
        with pytest.raises(TalkerLost, match="hosts of the cluster have to reach each other"):
            await anext(parts)

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from unittest.mock import Mock

import pytest

from deployments.errors import TalkerLost
from deployments.protocol import Mailbox
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


async def whole(address: Mailbox) -> str:
    async with aclosing(read(address)) as parts:
        return "".join([part async for part in parts])


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
    assert await whole(address) == text.text


async def test_many_read_one_text(server: MailboxServer) -> None:
    text = WrittenText()
    readers = [asyncio.create_task(whole(server.share("token", text))) for _ in range(5)]
    for word in ["one", "two", "three"]:
        await asyncio.sleep(0)
        text.append(word)
    text.finish()
    assert await asyncio.gather(*readers) == ["onetwothree"] * 5


async def test_a_reader_that_is_cut_off_again_and_again_goes_on_where_it_was(server: MailboxServer) -> None:
    text = WrittenText()
    address = server.share("token", text)
    async with aclosing(read(address)) as parts:
        for part in ("one, ", "два, ", "三、", "four"):  # more breaks than delays: each part starts them anew
            text.append(part)
            assert await anext(parts) == part
            for reader in list(server._readers):
                reader.cancel()
        text.finish()
        assert [part async for part in parts] == []


@pytest.mark.parametrize("token", ["another", ""])
async def test_only_its_token_opens_a_mailbox(server: MailboxServer, token: str) -> None:
    text = WrittenText()
    address = server.share("token", text)
    text.append("secret")
    text.finish()
    with pytest.raises(TalkerLost, match=rf"127.0.0.1:{address.port} \(the connection closed early\)"):
        await whole(replace(address, token=token))


async def test_a_removed_text_is_read_no_more(server: MailboxServer) -> None:
    text = WrittenText()
    address = server.share("token", text)
    text.append("begun")
    async with aclosing(read(address)) as parts:
        assert await anext(parts) == "begun"
        server.remove("token")
        with pytest.raises(TalkerLost):
            await anext(parts)


@pytest.mark.parametrize("error", [None, OSError(errno.EHOSTUNREACH, "No route to host"), TimeoutError()])
async def test_where_nobody_listens_says_what_to_open(error: OSError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    server = MailboxServer("127.0.0.1")
    await server.start()
    address = server.share("token", WrittenText())
    await server.aclose()
    if error is not None:
        monkeypatch.setattr(asyncio, "open_connection", Mock(side_effect=error))
    with pytest.raises(TalkerLost, match="hosts of the cluster have to reach each other"):
        await whole(address)


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


async def test_cancelling_at_the_connection_is_not_lost(server: MailboxServer, monkeypatch: pytest.MonkeyPatch) -> None:
    address = server.share("token", WrittenText())
    reading = asyncio.create_task(whole(address))
    open_connection = asyncio.open_connection

    async def connect(host: str, port: int) -> object:
        connected = await open_connection(host, port)
        reading.cancel()
        return connected

    monkeypatch.setattr(asyncio, "open_connection", connect)
    async with asyncio.timeout(30):
        await asyncio.wait((reading,))
    assert reading.cancelled()

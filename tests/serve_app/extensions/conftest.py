import asyncio
import os
from collections.abc import Iterator

import pytest

from serve_app.extensions.live.mailbox_server import MailboxServer


@pytest.fixture(scope="session", autouse=True)
def _listeners_are_closed() -> Iterator[None]:
    """One for live text that a test leaves open would fail another test, when the garbage collector finds it."""
    started, start = list[tuple[asyncio.Server, str]](), MailboxServer._start

    async def noted(server: MailboxServer) -> asyncio.Server:
        started.append((await start(server), os.environ["PYTEST_CURRENT_TEST"]))
        return started[-1][0]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MailboxServer, "_start", noted)
        yield
    assert [test for server, test in started if server.is_serving()] == [], "close LiveTexts"

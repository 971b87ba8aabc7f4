"""Texts that clients are still writing, for the talkers that read them with `deployments.serving.mailbox`."""

import asyncio
import contextlib

from deployments.protocol import Mailbox
from deployments.serving.mailbox import LENGTH

_MAX_REQUEST_BYTES = 256
_REQUEST_S = 5.0  # time limit for a reader to send its request


class WrittenText:
    """The text received for one segment, and whether it is complete."""

    def __init__(self) -> None:
        self.text = ""
        self.is_complete = False
        self._changed = asyncio.Event()

    def append(self, text: str) -> None:
        """Append text, which must not contain unpaired surrogates."""
        self.text += text
        self._wake()

    def finish(self) -> None:
        self.is_complete = True
        self._wake()

    async def wait(self, offset: int) -> str:
        """Wait for text after `offset` characters and return it, or an empty string at the end of the text."""
        while len(self.text) <= offset and not self.is_complete:
            await self._changed.wait()
        return self.text[offset:]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class MailboxServer:
    """TCP server for the texts of this process. Readers need the token of the text they request."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._texts: dict[str, WrittenText] = {}
        self._starting: asyncio.Task[asyncio.Server] | None = None
        self._readers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the server, unless it is already running. Raises OSError if the address cannot be bound."""
        self._starting = self._starting or asyncio.create_task(self._start())
        try:
            await asyncio.shield(self._starting)
        except OSError:
            self._starting = None
            raise

    def share(self, token: str, text: WrittenText) -> Mailbox:
        """Serve `text` under `token`. Returns the address for readers."""
        assert self._starting is not None, "start comes first"
        _, port, *_ = self._starting.result().sockets[0].getsockname()
        self._texts[token] = text
        return Mailbox(self._host, port, token)

    def remove(self, token: str) -> None:
        """Stop serving a text. If the text is incomplete, the server closes the connections of its readers."""
        text = self._texts.pop(token, None)
        if text is not None:
            text.finish()

    async def aclose(self) -> None:
        if self._starting is not None:
            (await self._starting).close()
        for reader in list(self._readers):
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _start(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, self._host, 0, limit=_MAX_REQUEST_BYTES)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        try:
            with contextlib.suppress(OSError, EOFError, TimeoutError, ValueError, asyncio.CancelledError):
                async with asyncio.timeout(_REQUEST_S):
                    token, offset = await _request(reader)
                if token in self._texts:
                    await self._send(token, offset, writer)
        finally:
            self._readers.discard(task)
            writer.close()

    async def _send(self, token: str, offset: int, writer: asyncio.StreamWriter) -> None:
        text = self._texts[token]
        while more := await text.wait(offset):
            part = more.encode()
            writer.write(LENGTH.pack(len(part)) + part)
            await writer.drain()
            offset += len(more)
        if token in self._texts:  # omit the end marker of a removed text
            writer.write(LENGTH.pack(0))
            await writer.drain()


async def _request(reader: asyncio.StreamReader) -> tuple[str, int]:
    """Return the requested token and the character offset at which to start."""
    token, offset = (await reader.readline()).decode("ascii").split()
    if int(offset) < 0:
        raise ValueError(offset)
    return token, int(offset)

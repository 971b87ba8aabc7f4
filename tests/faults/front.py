"""A load balancer in front of a server: ends TLS, and adds the address that it sees to X-Forwarded-For."""

import asyncio
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path


def certificate(folder: Path) -> Path:
    """Certificate and key of `localhost` in one file."""
    file = folder / "localhost.pem"
    name = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *name]
    subprocess.run([*command, "-keyout", str(file), "-out", str(file) + ".crt"], check=True, capture_output=True)
    file.write_bytes(file.read_bytes() + Path(f"{file}.crt").read_bytes())
    return file


@contextmanager
def tls_front(to_port: int, pem: Path) -> Iterator[int]:
    """The port on which it listens, on 127.0.0.1."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem)
    opened: Future[tuple[int, asyncio.Task[None]]] = Future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            from_server, to_server = await asyncio.open_connection("127.0.0.1", to_port)
            try:
                first, _, rest = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
                seen = writer.get_extra_info("peername")[0].encode()
                to_server.write(first + b"\r\nX-Forwarded-For: " + seen + b"\r\n" + rest)
                await asyncio.gather(copy(reader, to_server), copy(from_server, writer))
            finally:
                for each in (to_server, writer):
                    each.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
            task = asyncio.current_task()
            assert task is not None
            opened.set_result((server.sockets[0].getsockname()[1], task))
            with suppress(asyncio.CancelledError):
                await server.serve_forever()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    port, task = opened.result(timeout=30)
    try:
        yield port
    finally:
        task.get_loop().call_soon_threadsafe(task.cancel)
        thread.join()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the end of one side, which becomes the end of the other."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()

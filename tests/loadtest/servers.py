"""A speech server without a model that holds so much and no more, in a thread of the test."""

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

AUDIO = b"\x00\x40" * 2400  # 0.1 s at 24 kHz


@contextlib.contextmanager
def paced_server(*, gap_s: float) -> Iterator[str]:
    """Its URL. A request that comes within `gap_s` of the last one that was spoken is refused."""
    lock, spoken_s = threading.Lock(), [-gap_s]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(404, b"")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                now_s = time.monotonic()
                free = now_s - spoken_s[0] >= gap_s
                if free:
                    spoken_s[0] = now_s
            self.answer(200 if free else 429, AUDIO if free else b"{}")

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "audio/pcm")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

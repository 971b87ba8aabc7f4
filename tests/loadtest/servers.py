"""A speech server without a model that holds so much and no more, in a thread of the test."""

import contextlib
import json
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

AUDIO = b"\x00\x40" * 2400  # 0.1 s at 24 kHz


class QuietHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def running(handler: type[BaseHTTPRequestHandler], *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """The URL of a server in a thread of this process."""
    with ThreadingHTTPServer((host, port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://{host}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def paced_server(*, gap_s: float) -> Iterator[str]:
    """Its URL. A request that comes within `gap_s` of the last one that was spoken is refused."""
    lock, spoken_s = threading.Lock(), [-gap_s]

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(404, b"")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                now_s = time.monotonic()
                free = now_s - spoken_s[0] >= gap_s
                if free:
                    spoken_s[0] = now_s
            self.answer(200 if free else 429, AUDIO if free else b"{}", Content_Type="audio/pcm")

    with running(Handler) as url:
        yield url


class PeerHandler(QuietHandler):
    """What peers take and send, as their sources have it. A wrong form is refused, as they refuse it."""

    dialect = ""
    first_s = 0.0  # until the first audio
    room = threading.Semaphore(1)
    full = 429
    pieces = 3  # of 0.1 s
    bodies: list[bytes] = []  # noqa: RUF012, one class for each server

    def do_GET(self) -> None:
        self.refuse(404, "nothing here")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.bodies.append(body)
        if (problem := self.problem(body)) is not None:
            self.refuse(422, problem)
        elif not self.room.acquire(blocking=False):
            self.refuse(self.full, "too many requests", Retry_After="1")
        else:
            try:
                self.speak()
            except OSError:
                self.close_connection = True  # the client has left
            finally:
                self.room.release()

    def problem(self, body: bytes) -> str | None:
        match self.dialect:
            case "elevenlabs":
                if self.headers["xi-api-key"] != "k":
                    return "no key"
                right = self.path == "/v1/text-to-speech/rachel/stream?output_format=pcm_24000"
                return None if right and json.loads(body).keys() == {"text", "model_id"} else self.path
            case "vllm-omni":
                fields = json.loads(body)
                said = (fields.get("stream"), fields.get("stream_format"), fields.get("response_format"))
                return None if said == (True, "audio", "pcm") and fields["input"] else f"{said}"
            case "talkray":
                return None if "ignore_eos" in json.loads(body) else "no length"
            case _:
                form = b'name="text"' in body and b'name="speaker"' in body and b'name="streaming"' in body
                return None if form and self.path == "/generate" else "no form"

    def speak(self) -> None:
        self.send_response(200)
        wav = self.dialect == "voxserve"
        self.send_header("Content-Type", "audio/wav" if wav else "audio/pcm")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        time.sleep(self.first_s)
        head = b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 24000, 48000, 2, 16) + b"data\0\0\0\0"
        for piece in (head * wav + AUDIO, *[AUDIO] * (self.pieces - 1), b""):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.flush()
            time.sleep(0.01)

    def refuse(self, status: int, said: str, **headers: str) -> None:
        self.answer(status, json.dumps({"error": {"message": said}}).encode(), **headers)


@contextlib.contextmanager
def peer_server(dialect: str, *, first_s: float, streams: int, full: int = 429) -> Iterator[tuple[str, list[bytes]]]:
    """The URL of a server of that maker, and the bodies that came; more than `streams` at once are answered `full`."""
    own = {"dialect": dialect, "first_s": first_s, "room": threading.Semaphore(streams), "full": full, "bodies": []}
    with running(type("Handler", (PeerHandler,), own)) as url:
        yield url, own["bodies"]  # type: ignore[misc]

"""A server with OpenAI's chat and transcriptions that answers by rote, for examples that need a language model."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from tests.loadtest.servers import QuietHandler, running

STORY = (
    "Once there was a small harbour in the north. Every morning the boats went out to sea, and every evening the whole "
    "town waited for them. One day a great storm came over the water, and nobody could see the boats any more. An old "
    "woman lit a fire on the highest hill, and all the boats came home. Since then there is a light on that hill."
)
ANSWER = "It is half past nine in the morning."
_WORDS_PER_S = 30


@contextmanager
def fake_openai(
    transcripts: Sequence[str] = ("",), answer: str = ANSWER
) -> Iterator[tuple[str, list[list[dict[str, object]]]]]:
    """Its base URL, and the messages of each chat that was asked for. Who asks for a story gets STORY, others `answer`.
    Its recogniser hears the first of `transcripts` until there was a chat, and the next one then.
    """
    asked: list[list[dict[str, object]]] = []

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # whose answers end with the connection

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path.endswith("/audio/transcriptions"):
                heard = {"text": transcripts[min(len(asked), len(transcripts) - 1)]}
                self.answer(200, json.dumps(heard).encode(), content_type="application/json")
                return
            asked.append(messages := json.loads(body)["messages"])
            said = [str(message["content"]) for message in messages if message["role"] == "user"][-1]
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for number, word in enumerate((STORY if "story" in said else answer).split(" ")):
                time.sleep(1 / _WORDS_PER_S)
                self._chunk({"content": f" {word}" if number else word, "role": "assistant"}, None)
            self._chunk({}, "stop")
            self.wfile.write(b"data: [DONE]\n\n")

        def _chunk(self, delta: dict[str, str], finish: str | None) -> None:
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "rote"}
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            self.wfile.write(f"data: {json.dumps({**chunk, 'choices': [choice]})}\n\n".encode())
            self.wfile.flush()

        def handle(self) -> None:
            try:
                super().handle()
            except (BrokenPipeError, ConnectionResetError):  # an interrupted client reads no further
                self.close_connection = True

    with running(Handler) as url:
        yield f"{url}/v1", asked

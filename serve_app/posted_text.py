"""Text that is posted in parts, each in a request of its own, while another request hears it: any of them may reach any
ingress replica.

The one that gets the first request keeps the text, and hands it out in its mailbox. The others ask there: the text's id
names the mailbox. It is signed, so that nobody is asked whom no replica named, and for one client, so that it opens
nothing to another one.
"""

import asyncio
import base64
import hmac
import json
import secrets
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments import metrics
from deployments.errors import InvalidRequest, Overloaded
from deployments.mailbox import MailboxServer, WrittenText, read, tell
from deployments.protocol import Mailbox
from serve_app.errors import Conflict, NotFound
from serve_app.session import MAX_UNSPOKEN_CHARS

MAX_UNHEARD = 64  # texts of one client that nobody has asked to hear
MAX_KEPT_BYTES = 64 << 20  # of all texts: recordings to clone are among them
_POST_BYTES = 4096  # that one takes besides
_IDLE_S = 60.0  # without a request for it a text that is heard ends, any other is forgotten
_READ_S = 10.0  # for a text that is over to be read to its end
_RETRY_S = 1.0
_SECRET_BYTES, _TOKEN_BYTES = 32, 16
_UNKNOWN = "request_id: there is no such stream, or it is over: start another one."
_REFUSALS: Mapping[str, tuple[type[InvalidRequest], str, str]] = {
    "text_ended": (Conflict, "request_id", "the text of this stream has ended: start another one"),
    "audio_taken": (Conflict, "request_id", "the audio of this stream goes to another request: start another one"),
    "string_above_max_length": (
        InvalidRequest,
        "text",
        f"the text has more than {MAX_UNSPOKEN_CHARS} characters: send it in several streams",
    ),
}


def draw_secret() -> bytes:
    """What all ingress replicas of an application sign with."""
    return secrets.token_bytes(_SECRET_BYTES)


@dataclass(slots=True)
class _Post:
    """One text, where it is kept."""

    client: str
    fields: str  # JSON, until somebody claims the text
    text: WrittenText = field(default_factory=WrittenText)
    is_claimed: bool = False
    idling: asyncio.TimerHandle | None = None

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        return _POST_BYTES + len(self.fields) + len(self.text.text)

    def append(self, text: str) -> dict[str, str]:
        """The answer, as those of the others."""
        if self.text.is_over:
            return {"refused": "text_ended"}
        if len(self.text.text) + len(text) > MAX_UNSPOKEN_CHARS:
            return {"refused": "string_above_max_length"}
        self.text.append(text)
        return {}

    def finish(self) -> dict[str, str]:
        """Once more does no harm."""
        self.text.finish()
        return {}

    def claim(self) -> dict[str, str]:
        """Whoever asks first gets the fields, and may read the text."""
        if self.is_claimed:
            return {"refused": "audio_taken"}
        self.is_claimed, fields, self.fields = True, self.fields, ""
        return {"fields": fields}


class PostedTexts:
    """The posted texts that this ingress process keeps, and the way to those of the others.

    All methods that take an id raise NotFound where there is no such text of this client, ReplicaLost where the process
    that keeps it cannot be reached.
    """

    def __init__(self, server: MailboxServer, secret: bytes) -> None:
        """`secret` is the same in all ingress processes."""
        self._server, self._secret = server, secret
        self._posts: dict[str, _Post] = {}  # by token

    async def open(self, fields: Mapping[str, object], *, client: str) -> str:
        """The id of a new text, which is kept while requests for it come. `fields` go to whoever claims it.

        Raises Overloaded where too much is kept already.
        """
        post = _Post(client, json.dumps(fields))
        others = self._posts.values()
        if sum(not other.is_claimed for other in others if other.client == client) >= MAX_UNHEARD:
            raise _refused(f"This client has {MAX_UNHEARD} streams that nobody has asked to hear: ask for their audio.")
        if sum(other.size for other in others) + post.size > MAX_KEPT_BYTES:
            raise _refused(f"The streams that are being written take {MAX_KEPT_BYTES} bytes.")
        await self._server.start()
        token = secrets.token_hex(_TOKEN_BYTES)
        self._posts[token] = post
        mailbox = self._server.share(token, post.text, lambda message: self._take(token, message))
        self._wait(token)
        return self._id(mailbox, client)

    async def append(self, post_id: str, text: str, *, client: str) -> None:
        """The text goes on with `text`. Raises InvalidRequest where it becomes too long, Conflict where it is over."""
        if len(text) > MAX_UNSPOKEN_CHARS:
            raise _refusal("string_above_max_length")
        whole = text.encode("utf-8", "replace").decode()
        await self._ask(self._mailbox(post_id, client), "append", whole)

    async def finish(self, post_id: str, *, client: str) -> None:
        """There is no more text."""
        await self._ask(self._mailbox(post_id, client), "finish")

    async def claim(self, post_id: str, *, client: str) -> tuple[dict[str, object], AsyncGenerator[str, None]]:
        """The fields that it was opened with, and the text in parts as it is written. Raises Conflict where another
        request has claimed it.
        """
        mailbox = self._mailbox(post_id, client)
        told = await self._ask(mailbox, "claim")
        return json.loads(told["fields"]), read(mailbox)

    async def _ask(self, mailbox: Mailbox, *asked: str) -> dict[str, Any]:
        answer = await tell(mailbox, json.dumps(asked, ensure_ascii=False).encode())
        if answer is None:
            raise NotFound(_UNKNOWN, "request_id", "not_found")
        told: dict[str, Any] = json.loads(answer)
        if "refused" in told:
            raise _refusal(told["refused"])
        return told

    def _take(self, token: str, message: bytes) -> bytes:
        """Obey a message of `_ask`."""
        post = self._posts[token]
        match json.loads(message):
            case ["append", text]:
                answer = post.append(text)
            case ["claim"]:
                answer = post.claim()
            case _:
                answer = post.finish()
        self._wait(token)
        return json.dumps(answer).encode()

    def _wait(self, token: str) -> None:
        post = self._posts[token]
        if post.idling is not None:
            post.idling.cancel()
        after_s = _READ_S if post.is_claimed and post.text.is_over else _IDLE_S
        post.idling = asyncio.get_running_loop().call_later(after_s, self._give_up, token)

    def _give_up(self, token: str) -> None:
        post = self._posts[token]
        if post.is_claimed and not post.text.is_over:
            post.finish()
            self._wait(token)
            return
        del self._posts[token]
        self._server.remove(token)

    def _id(self, mailbox: Mailbox, client: str) -> str:
        address = f"{mailbox.host} {mailbox.port} {mailbox.token}"
        name = base64.urlsafe_b64encode(address.encode()).decode().rstrip("=")
        return f"{name}.{self._signature(name, client)}"

    def _mailbox(self, post_id: str, client: str) -> Mailbox:
        name, _, signature = post_id.partition(".")
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), self._signature(name, client).encode()):
            raise NotFound(_UNKNOWN, "request_id", "not_found")
        host, port, token = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode().split()
        return Mailbox(host, int(port), token)

    def _signature(self, name: str, client: str) -> str:
        return hmac.new(self._secret, json.dumps([name, client]).encode(), "sha256").hexdigest()


def _refusal(code: str) -> InvalidRequest:
    kind, param, message = _REFUSALS[code]
    return kind(f"{param}: {message}.", param, code)


def _refused(reason: str) -> Overloaded:
    metrics.refused("texts")
    return Overloaded(f"{reason} One is forgotten after {_IDLE_S:g} s without a request for it.", _RETRY_S)

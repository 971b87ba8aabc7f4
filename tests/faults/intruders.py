"""What hostile clients do, one after another; each returns what it got."""

import contextlib
import json
import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.hostile import SPEECH, RawSocket, ask, connected, read_to_end, unfinished

HELD_S = 12.0  # that a connection is held
ENDLESS = {"input": "I will not stop.", "voice": "alloy", "response_format": "pcm"}
ENDLESS |= {"ignore_eos": True, "max_new_tokens": 1500}
SHORT = {"input": "Hello.", "voice": "alloy", "response_format": "pcm", "max_new_tokens": 2}
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Intruder:
    """One that means no good: a valid key, and an address."""

    port: int
    key: str
    address: str

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def leaves(self) -> str:
        """Asks for minutes of speech, and leaves after the first of it."""
        with connected(self.port, self.address) as raw:
            self._request(raw, ENDLESS)
            return first_line(raw.recv(4096))

    def closes_its_half(self) -> str:
        """Sends a whole request, and that it will send nothing more."""
        with connected(self.port, self.address) as raw:
            self._request(raw, SHORT)
            raw.shutdown(socket.SHUT_WR)
            return first_line(read_to_end(raw, HELD_S))

    def ends_its_body_early(self) -> str:
        """Closes its half in the middle of the body."""
        with connected(self.port, self.address) as raw:
            unfinished(raw, self.key)
            raw.shutdown(socket.SHUT_WR)
            return first_line(read_to_end(raw, HELD_S))

    def never_ends_its_body(self) -> str:
        """Holds a connection whose body does not come."""
        with connected(self.port, self.address) as raw:
            unfinished(raw, self.key)
            return first_line(read_to_end(raw, HELD_S))

    def sends_garbage(self) -> str:
        """Bytes that are no request."""
        with connected(self.port, self.address) as raw:
            raw.sendall(os.urandom(2048) + b"\r\n\r\n")
            return first_line(read_to_end(raw, HELD_S))

    def sends_no_json(self) -> str:
        """A request whose body is none."""
        with connected(self.port, self.address) as raw:
            self._send(raw, os.urandom(512), self.key)
            return first_line(read_to_end(raw, HELD_S))

    def guesses_keys(self) -> str:
        """Several wrong ones."""
        wrong = {"Authorization": f"Bearer {self.key[:-4]}nope"}
        return str({ask(self.port, SHORT, source=self.address, headers=wrong)[0] for _ in range(5)})

    def asks_for_nines(self) -> str:
        """A text that grows when it is spoken."""
        return str(ask(self.port, {**SHORT, "input": "9" * 4096}, source=self.address, headers=self.bearer)[0])

    def reads_slowly(self) -> str:
        """Takes little of an endless utterance, then leaves."""
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.settimeout(HELD_S)
            raw.bind((self.address, 0))
            raw.connect(("127.0.0.1", self.port))
            self._request(raw, ENDLESS)
            got, until_s = b"", time.monotonic() + HELD_S
            while time.monotonic() < until_s and (data := raw.recv(512)):
                got += data
                time.sleep(0.5)
            return first_line(got)

    def leaves_messages_unfinished(self) -> str:
        """Ten sockets with a megabyte each of a message that does not end."""
        said = set()
        with contextlib.ExitStack() as opened:
            for _ in range(10):
                client = RawSocket(opened.enter_context(connected(self.port, self.address)), key=self.key)
                with contextlib.suppress(ConnectionError):
                    client.send(b" " * MIB, final=False)
                said.add(client.status)
            time.sleep(HELD_S / 2)
        return str(said)

    def _request(self, raw: socket.socket, fields: dict[str, object]) -> None:
        self._send(raw, json.dumps(fields).encode(), self.key)

    @staticmethod
    def _send(raw: socket.socket, content: bytes, key: str) -> None:
        lines = (f"POST {SPEECH} HTTP/1.1", "Host: localhost", "Content-Type: application/json")
        lines += (f"Authorization: Bearer {key}", f"Content-Length: {len(content)}", "", "")
        raw.sendall("\r\n".join(lines).encode() + content)


ACTS: tuple[Callable[[Intruder], str], ...] = (
    Intruder.leaves,
    Intruder.closes_its_half,
    Intruder.ends_its_body_early,
    Intruder.never_ends_its_body,
    Intruder.sends_garbage,
    Intruder.sends_no_json,
    Intruder.guesses_keys,
    Intruder.asks_for_nines,
    Intruder.reads_slowly,
    Intruder.leaves_messages_unfinished,
)


def first_line(answer: bytes) -> str:
    """Status line of an answer."""
    words = answer.partition(b"\r\n")[0].split(b" ")
    return words[1].decode(errors="replace") if len(words) > 1 and answer.startswith(b"HTTP/") else "no answer"


def intrude(port: int, key: str, chance: random.Random) -> tuple[str, str]:
    """One act of one hostile client: which, and what it got."""
    act = chance.choice(ACTS)
    try:
        return act.__name__, act(Intruder(port, key, f"127.0.0.{chance.randrange(200, 208)}"))
    except (OSError, EOFError, ValueError, IndexError) as error:
        return act.__name__, type(error).__name__
    except Exception as error:  # http.client has its own
        return act.__name__, type(error).__name__

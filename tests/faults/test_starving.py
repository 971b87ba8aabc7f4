"""One client that asks for all it can get, on a machine that is busy with other work: the others are spoken."""

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException

import pytest

from tests.e2e.black_box import ServerCommand, serving
from tools.suites.raw import answered, ask

# Processes that never wait, for each core two or three.
BUSY = 6
OTHERS, REQUESTS = 5, 20
SPOKEN = 0.9
SHORT = {"input": "Hello there.", "voice": "alloy", "response_format": "pcm", "max_new_tokens": 8}
# One utterance after the other, of one client.
GREEDY = {
    "digits, which grow when they are spoken": "9" * 4096,
    "the longest text, again and again": "On and on and on it goes. " * 157,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerCommand]:
    with serving(tmp_path_factory.mktemp("starving")) as server:
        yield server


@contextmanager
def busy_machine() -> Iterator[None]:
    """Other work on every core, at the server's own priority."""
    with ExitStack() as working:
        for _ in range(BUSY):
            process = working.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            working.callback(process.kill)
        yield


@contextmanager
def greedy_client(port: int, text: str, seen: list[int]) -> Iterator[None]:
    """One request at a time; whatever comes of one, the next follows. It leaves in the middle of its last one."""
    enough = threading.Event()
    fields = {**SHORT, "input": text, "max_new_tokens": 600}

    def ask_on() -> None:
        while not enough.is_set():
            with suppress(OSError, HTTPException), answered(port, fields, source="127.0.0.66") as answer:
                seen.append(answer.status)
                while not enough.is_set() and answer.read1(4096):
                    pass

    thread = threading.Thread(target=ask_on)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


@pytest.mark.parametrize("kind", GREEDY)
def test_the_others_are_spoken(server: ServerCommand, kind: str) -> None:
    greedy, polite = list[int](), list[int]()
    with greedy_client(server.port, GREEDY[kind], greedy), busy_machine():
        for number in range(REQUESTS):
            status, _, answer = ask(server.port, SHORT, source=f"127.0.0.{100 + number % OTHERS}")
            polite.append(status)
            if status != 200:
                print(status, answer.decode())
    print(f"{kind}: others {Counter(polite)}, the greedy client {Counter(greedy)}")
    assert polite.count(200) >= SPOKEN * REQUESTS

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deployments.serving.processes import any_runnable, is_runnable


def wait_for_state(process: int, state: str) -> None:
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != state:
        pass


def test_a_thread_that_waits_is_not_runnable() -> None:
    wait, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait.wait)
    thread.start()
    assert thread.native_id is not None
    while is_runnable("self", thread.native_id):
        ended.wait(0.01)
    assert is_runnable("self", threading.get_native_id())
    wait.set()
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():  # the kernel ends it a little after Python has
        ended.wait(0.01)
    assert not is_runnable("self", thread.native_id)


@pytest.mark.parametrize(("script", "state"), [
    ("print(flush=True)\nwhile True: pass", "R"),
    (("import hashlib, threading as t\n"
     "t.Thread(target=hashlib.pbkdf2_hmac, args=('md5', b'', b'', 1 << 30)).start()\nprint(flush=True)"), "S"),
])  # fmt: skip
def test_a_process_that_stands_still_is_not_runnable(script: str, state: str) -> None:
    """The state is that of the main thread. In the second script another thread works, without Python's lock."""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # its start is over, which waits for files now and then
            wait_for_state(process.pid, state)
            assert any_runnable(process.pid)
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # returns once all threads have stopped
            assert not any_runnable(process.pid)
        finally:
            process.kill()
    assert not any_runnable(process.pid)

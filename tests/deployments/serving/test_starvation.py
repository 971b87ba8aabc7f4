import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from deployments.serving.starvation import any_runnable, is_runnable


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


def test_a_process_that_stands_still_is_not_runnable() -> None:
    script = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # its start is over, which waits for files now and then
            wait_for_state(process.pid, "R")
            assert any_runnable(process.pid)
            os.kill(process.pid, signal.SIGSTOP)
            wait_for_state(process.pid, "T")
            assert not any_runnable(process.pid)
        finally:
            process.kill()
    assert not any_runnable(process.pid)

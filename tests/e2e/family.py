"""`python tests/e2e/family.py OUTPUT COMMAND...`: run a command whose every process stays below this one.

Processes whose parent dies come back here instead of going to init, however they were started, so that a test sees all
that a server leaves behind: Ray's agents erase their environment, and workers open sessions of their own. Prints the
command's process id, then its exit status; lives until it is killed. With TALKRAY_TEST_TERMINAL the command has a
terminal of its own, which is closed when this process reads a line.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import subprocess
import sys
import termios
import threading

PR_SET_CHILD_SUBREAPER = 36
TERMINAL = "TALKRAY_TEST_TERMINAL"


def start(command: list[str], output: str) -> "subprocess.Popen[bytes]":
    with open(output, "wb") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)


def start_on_terminal(command: list[str], output: str) -> "subprocess.Popen[bytes]":
    """The command on a terminal of its own, whose window closes when somebody writes a line to us."""
    ours, its = os.openpty()
    os.set_inheritable(its, True)

    def lead() -> None:
        os.setsid()
        fcntl.ioctl(its, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, preexec_fn=lead)
    os.close(its)
    file = open(output, "wb", buffering=0)  # noqa: SIM115 - the thread closes it

    def copy() -> None:
        """One thread reads and closes: while another one reads, the terminal would not hang up."""
        with file:
            while sys.stdin not in select.select([ours, sys.stdin], [], [])[0]:
                try:
                    file.write(os.read(ours, 4096))
                except OSError:  # nobody has the other side open
                    break
        os.close(ours)

    threading.Thread(target=copy, daemon=True).start()
    return process


def main(output: str, command: list[str]) -> None:
    """Run it and stay, burying whoever dies."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    process = (start_on_terminal if os.environ.get(TERMINAL) else start)(command, output)
    sys.stdout.write(f"{process.pid}\n")
    sys.stdout.flush()
    is_reaped = False
    while True:
        if not is_reaped and process.poll() is not None:
            sys.stdout.write(f"{process.returncode}\n")
            sys.stdout.flush()
            is_reaped = True
        with contextlib.suppress(ChildProcessError):
            # Only once ours is buried by Popen may anybody's status be taken.
            if is_reaped:
                os.waitpid(-1, os.WNOHANG)
        threading.Event().wait(0.02)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

"""However a server ends, it says so and leaves nothing: no process, no port, no growing heap of folders."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e import black_box

EVERY_PROCESS, KILL = "TERM to every process", "KILL to the process"  # `make e2e` ends a server so

# What a start prints when it comes to a stage, and how long into that stage the signal comes.
STAGES = {"imports": ("", 0.1), "Ray": ("starting Ray", 0.7), "proxy": ("starting the proxy", 1.5)} | {
    "replicas": ("speech model starting", 1.0),
    "warm-up": ("talker: loading the talker", 0.2),
}


@pytest.mark.parametrize("way", sorted({*black_box.WAYS} - {EVERY_PROCESS, KILL}))
def test_it_ends_while_it_speaks(way: str, tmp_path: Path) -> None:
    with black_box.serving(tmp_path, terminal=way == "closed terminal") as server:
        black_box.ends_while_it_speaks(server, way)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", [EVERY_PROCESS, "INT to its group", KILL])
def test_it_ends_while_it_starts(way: str, stage: str, started: black_box.ServerCommand) -> None:
    line, later_s = STAGES[stage]
    started.reach(line)
    time.sleep(later_s)
    black_box.WAYS[way](started)
    started.leaves_nothing()
    assert started.wait(1) != 0


BEFORE_US_S = 0.1  # until then Python itself may be starting, which answers in its own way
MOMENTS = 32  # half a second apart where a start takes 16 s
STOPPED = {0, 128 + signal.SIGINT, -signal.SIGINT}  # while it serves, while it starts, while it is imported


def test_ctrl_c_at_any_moment_of_a_start(tmp_path: Path, port: int) -> None:
    """No traceback, nothing left, and a status that says what happened; while it speaks, see above."""
    began_s = time.monotonic()
    with black_box.serving(tmp_path, port=port):
        start_s = time.monotonic() - began_s
    for moment in range(MOMENTS + 1):
        after_s = max(BEFORE_US_S, start_s * moment / MOMENTS)
        print(f"Ctrl-C {after_s:.1f} s after the command, {start_s:.1f} s take it to ready")
        with black_box.starting(tmp_path) as server:
            interrupt(server, after_s)


def interrupt(server: black_box.ServerCommand, after_s: float) -> None:
    time.sleep(after_s)
    speaks = "Press Ctrl-C to stop." in server.output
    server.signal_group(signal.SIGINT)
    server.leaves_nothing()
    assert server.wait(1) in STOPPED
    assert (server.status == 0) <= speaks
    assert "Traceback" not in server.output


@pytest.mark.parametrize(
    ("title", "interrupted"), [(black_box.RAYLET, False), (black_box.GCS, False), (black_box.GCS, True)]
)
def test_a_start_waits_for_parts_of_ray_that_get_no_time(
    started: black_box.ServerCommand, title: str, interrupted: bool
) -> None:
    """Ray itself gives up after half a minute. A stopped process stands for one of an overloaded machine."""
    while not (found := started.find(title)):
        assert started.status is None, started.output
    for process in found:
        os.kill(process, signal.SIGSTOP)
    started.reach("starting Ray: 20 s" if interrupted else "starting Ray: 70 s", within_s=120)
    if interrupted:
        started.signal_group(signal.SIGINT)
        started.wait(within_s=5)
        started.leaves_nothing()
        return
    for process in found:
        os.kill(process, signal.SIGCONT)
    started.ready()


def test_without_its_raylet(started: black_box.ServerCommand, tmp_path: Path, port: int) -> None:
    """It ends; the next one, as under a supervisor, speaks on the same port and ends in another way."""
    started.ready()
    [raylet] = started.find(black_box.RAYLET)
    with black_box.Sampled(started) as sampled:
        os.kill(raylet, signal.SIGKILL)
        status = started.wait(within_s=30)
    started.leaves_nothing()
    assert status not in (0, -signal.SIGABRT)
    assert "raylet" in started.output.splitlines()[-1] or "raylet" in started.output.splitlines()[-2]
    assert 429 not in sampled.answers()
    with black_box.serving(tmp_path, port=port) as server:
        black_box.ends_while_it_speaks(server, EVERY_PROCESS)


def test_without_its_control_store(started: black_box.ServerCommand, tmp_path: Path, port: int) -> None:
    started.ready()
    [gcs] = started.find(black_box.GCS)
    with black_box.Sampled(started) as sampled:
        os.kill(gcs, signal.SIGKILL)
        status = started.wait(within_s=90)
    started.leaves_nothing()
    assert status not in (0, -signal.SIGABRT)
    assert 429 not in sampled.answers()
    black_box.speaks_again(tmp_path, port)


# So long after the last audio a line on a busy machine may be a line: `api.admission.max_line_s`, and a second for a
# first audio.
LINE_S = 1.25


def test_without_a_talker_nobody_is_told_to_slow_down(started: black_box.ServerCommand) -> None:
    """The pool's only talker dies: 503 until there is another one, not 429, and `/ready` says so."""
    started.ready()
    for victim in (black_box.TALKER, black_box.ENGINE):
        [process] = started.find(victim)
        with black_box.Sampled(started) as sampled:
            os.kill(process, signal.SIGKILL)
            killed_s = time.monotonic()
            back_s = sampled.first_spoken(after_s=killed_s + 1.0) - killed_s
        meanwhile = [each for each in sampled.speech if killed_s < each[0] < killed_s + back_s]
        told = {answer for asked_s, answer in meanwhile if answer != 429 or asked_s > killed_s + LINE_S}
        print(f"{victim} killed: speech after {back_s:.1f} s; {sorted(map(str, told))}")
        assert told <= {200, 503}  # once it is back, a busy machine may have too much to do
        assert {answer for _, answer in sampled.ready} == {200, 503}
        assert back_s < 20


def test_without_its_proxy(started: black_box.ServerCommand) -> None:
    """HAProxy is back at once, twice, and still learns of new ingress replicas; nobody gets a 404."""
    started.ready()
    for _ in range(2):
        [proxy] = started.find(black_box.HAPROXY)
        with black_box.Sampled(started) as sampled:
            os.kill(proxy, signal.SIGKILL)
            killed_s = time.monotonic()
            back_s = sampled.first_spoken(after_s=killed_s + 0.1) - killed_s
            time.sleep(3)
        print(f"HAProxy killed: speech after {back_s:.1f} s; {sorted(map(str, sampled.answers()))}")
        assert back_s < 5
        assert {answer for answer in sampled.answers() if isinstance(answer, int)} <= {200, 503}
    speaks_through_another_ingress(started)


@pytest.mark.parametrize("before", ["", "ServeController"])
def test_without_the_actor_that_manages_the_proxy(before: str, started: black_box.ServerCommand) -> None:
    """HAProxy goes on meanwhile, and the actor's successor takes over from it: no request is lost.

    So too where a controller makes the successor that has been restarted itself.
    """
    started.ready()
    if before:
        spared(started, before, for_s=10)
    [manager], [proxy] = started.find(black_box.MANAGER), started.find(black_box.HAPROXY)
    with black_box.Sampled(started) as sampled:
        os.kill(manager, signal.SIGKILL)
        until_s = time.monotonic() + 90
        while proxy in started.find(black_box.HAPROXY) or not started.find(black_box.HAPROXY):
            assert time.monotonic() < until_s, "nobody took over"
            time.sleep(0.5)
        time.sleep(3)
    assert sampled.answers() <= {200, 429}  # those who ask may be too many for this machine
    speaks_through_another_ingress(started)


def speaks_through_another_ingress(server: black_box.ServerCommand) -> None:
    """HAProxy still learns of new replicas."""
    [ingress] = server.find(black_box.INGRESS)
    with black_box.Sampled(server) as sampled:
        os.kill(ingress, signal.SIGKILL)
        killed_s = time.monotonic()
        back_s = sampled.first_spoken(after_s=killed_s + 1.0) - killed_s
    assert back_s < 20


# Of Ray and Serve, in the command line: what is replaced or not needed, and what is neither.
SPARED = ("ServeController", "ray::ProxyActor")
VITAL = ("serve_app.cli.serve.driver", "ray::RuntimeEnvAgent", "ray::DashboardAgent")


def test_without_what_can_be_spared(started: black_box.ServerCommand) -> None:
    started.ready()
    for part in SPARED:
        spared(started, part, for_s=6)


def spared(server: black_box.ServerCommand, part: str, *, for_s: float) -> None:
    for process in server.find(part):
        os.kill(process, signal.SIGKILL)
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        assert server.speak() == 200, part
        assert server.get("/ready") == 200, part
        time.sleep(0.5)


@pytest.mark.parametrize("part", VITAL)
def test_without_what_cannot(part: str, started: black_box.ServerCommand) -> None:
    started.ready()
    [process] = started.find(part)
    os.kill(process, signal.SIGKILL)
    assert started.wait(within_s=20) not in (0, -signal.SIGABRT)
    started.leaves_nothing()


def test_a_start_clears_what_a_dead_server_left(started: black_box.ServerCommand, tmp_path: Path, port: int) -> None:
    """All of it but HAProxy is killed in one go: nobody is left who could clear up."""
    started.ready()
    [proxy] = started.find(black_box.HAPROXY)
    stop_then_kill([process for process in started.processes() if process != proxy])
    assert black_box.listens(port)
    assert "cleared" in black_box.speaks_again(tmp_path, port)
    started.leaves_nothing()


def stop_then_kill(processes: list[int]) -> None:
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            os.kill(process, number)


FOLDERS = ("talkray-*", "ray/session_2*", "haproxy-serve/*")


def folders() -> set[Path]:
    """What servers write to on this machine."""
    return {path for pattern in FOLDERS for path in Path("/tmp").glob(pattern)}


def test_folders_do_not_pile_up(tmp_path: Path, port: int) -> None:
    before = folders()
    for _ in range(3):
        with black_box.starting(tmp_path, port=port) as server:
            server.reach("starting the proxy")
            server.signal_group(signal.SIGKILL)
            time.sleep(black_box.GONE_S)
    assert len(folders() - before) <= 1
    black_box.speaks_again(tmp_path, port)
    assert len(folders() - before) <= 1


def test_a_port_in_use_is_no_reason_to_end_anybody(started: black_box.ServerCommand, port: int) -> None:
    """Another server of the same user lives: a second start on its port is refused, and harms nobody."""
    started.ready()
    command = ["serve", "--model", "embedded", "--port", str(port)]
    refused = subprocess.run([*black_box.COMMAND, *command], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert "Address already in use" in refused.stderr
    assert started.speak() == 200

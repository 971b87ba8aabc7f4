"""Starts the engine of a single talker beside Ray, and hands it to the talker's replica.

Ray, Serve and the replica's own imports take longer than the engine, which would otherwise start after them.
"""

import os
import socket
import subprocess
import threading
from collections.abc import Callable

from deployments.gpu.card import count_gpus
from deployments.talker.process import channel
from serve_app.cli.serve.run_folder import RunFolder
from serve_app.config import AppConfig

_BACKLOG = 1


def begin(config: AppConfig, folder: RunFolder, report: Callable[[str], None]) -> None:
    """Start the engine if it is certain which one the application needs. Replicas find it by `channel.EARLY_ENGINE`.

    The engine ends with this process, until a replica has claimed it. From then on it ends with the replica.
    """
    single = _only_talker(config)
    if single is None:
        return
    report("starting the speech model")
    start = channel.EngineStart(model=single.model, config=single.talker, makes_audio=single.codec.placement != "pool")
    ours, theirs = socket.socketpair()
    threads = str(max(1, int(single.talker_pool.num_cpus)))  # as Ray sets it for the replica
    with theirs:
        process = subprocess.Popen(
            channel.engine_command(start, theirs.fileno()),
            pass_fds=[theirs.fileno()],
            env={"OMP_NUM_THREADS": threads} | os.environ,
        )
    server, path = socket.socket(socket.AF_UNIX), str(folder.path / "engine.sock")
    server.bind(path)
    server.listen(_BACKLOG)
    os.environ[channel.EARLY_ENGINE] = path
    threading.Thread(target=_hand_over, args=(server, ours, process, start), daemon=True).start()


def _only_talker(config: AppConfig) -> AppConfig | None:
    """Return the settings of the only talker replica; None if there are several, or if its GPU is not known yet."""
    [single, *others] = config.by_model().values()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    num_gpus = count_gpus() if visible is None else len([*filter(None, visible.split(","))])
    if others or single.talker_scaling is not None or single.talker_pool.replicas != 1:
        return None
    return single if num_gpus == (single.talker_pool.num_gpus > 0) else None


def _hand_over(
    server: socket.socket, ours: socket.socket, process: "subprocess.Popen[bytes]", start: channel.EngineStart
) -> None:
    """Give the engine's socket to the first replica that asks. The engine ends if the replica asks for another one."""
    with server, ours, server.accept()[0] as replica, replica.makefile("rb") as request:
        if request.readline().strip() == start.model_dump_json().encode():
            socket.send_fds(replica, [str(process.pid).encode()], [ours.fileno()])
    process.wait()

"""The newest clients from their registries, unmodified, each in an environment of its own under `.clients`."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".clients"
PYTHON = {
    "livekit": (
        "livekit-agents", "livekit-plugins-openai", "livekit-plugins-deepgram", "livekit-plugins-elevenlabs",
        "livekit-plugins-cartesia", "livekit-plugins-simplismart",
    ),
    "pipecat": ("pipecat-ai[openai,deepgram,elevenlabs,cartesia]",),
    "openai": ("openai[realtime]",), "deepgram": ("deepgram-sdk",), "elevenlabs": ("elevenlabs",),
    "cartesia": ("cartesia[websockets]",), "dashscope": ("dashscope",), "wyoming": ("wyoming",),
    "sequences": ("aiohttp",),
}  # fmt: skip
NODE = "node@22"  # which the newest packages need
JAVASCRIPT = {
    "npm": ("openai", "ai", "@ai-sdk/openai", "zod", "@mistralai/mistralai"),
    "livekit-js": (
        "@livekit/agents", "@livekit/agents-plugin-openai", "@livekit/agents-plugin-deepgram",
        "@livekit/agents-plugin-elevenlabs",
    ),
}  # fmt: skip


def command(name: str, script: Path) -> list[str]:
    """What runs a script in its environment, which is made where there is none; delete `.clients` for newer ones."""
    folder = FOLDER / name
    if not (folder / ".installed").exists():
        print(f"installing {name} into {folder}", flush=True)
        _install(name, folder)
        (folder / ".installed").touch()
    return [str(folder / ("node_modules/.bin/node" if name in JAVASCRIPT else "bin/python")), str(script)]


def _install(name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if name in JAVASCRIPT:
        npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix", folder]
        subprocess.run([*npm, NODE], check=True)
        # npm takes the newest packages for the Node on which it runs.
        path = os.pathsep.join([str(folder / "node_modules/.bin"), os.environ["PATH"]])
        subprocess.run([*npm, *JAVASCRIPT[name]], check=True, env={**os.environ, "PATH": path})
        return
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--upgrade"]
    subprocess.run([*pip, *PYTHON[name]], check=True)

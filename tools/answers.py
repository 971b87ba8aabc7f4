"""Check that a change leaves the server's responses unchanged: record before and after it, and compare.

    python -m pytest -q -p tools.answers --answers before.json tests/serve_app/extensions/test_contract.py
    python -m tools.answers speech http://127.0.0.1:8000 before.npz
    python -m tools.answers compare before.json after.json

The first command is a pytest plugin. It records each HTTP response and WebSocket of the tests, keyed by test name and
path, with ids, times and dates masked. Two recordings before the change reveal nondeterministic responses. The second
command stores codes and PCM of 100 seeded requests. On the same machine and model, codes are equal, and PCM differs by
at most one step.
"""

import hashlib
import io
import json
import re
import sys
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serve_app.api.context import RequestContext
from talkray_tools.decode_frames import HEADER, records

_MASKED = re.compile(
    r"\b[0-9a-f]{8,}\b|\d{4}-\d\d-\d\d[T ][\d:.]+|\b\d+\.\d+(e-?\d+)?\b|\b\d{7,}\b|(?<=_)[0-9A-Za-z]{12,}\b|0x[0-9a-f]+"
)
_UNSTABLE_HEADERS = (b"x-request-id", b"server-timing", b"date", b"content-length", b"etag", b"last-modified")
_SHOWN = 400  # characters of a text that are stored to show a difference
_TEXTS = ("Good morning.", "The meeting starts at 9:30.", "It costs $12.50, or 1,000 a year.", "Is Dr. Smith in?")
NUM_SEEDS = 100


class _Recorder:
    """Pytest plugin that wraps the outermost middleware of every API that the tests build."""

    def __init__(self, file: Path) -> None:
        self._file, self._test, self._seen = file, "", Counter[str]()
        self.answers: dict[str, dict[str, str]] = {}
        inner = RequestContext.__call__

        async def recorded(context: RequestContext, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan":
                await inner(context, scope, receive, send)
                return
            query = scope.get("query_string", b"").decode("latin-1")
            key = f"{self._test} | {scope.get('method', 'WS')} {scope.get('path', '')}?{query}"
            self._seen[key] += 1
            messages: list[Any] = []

            async def kept(message: Any) -> None:
                messages.append(message)
                await send(message)

            try:
                await inner(context, scope, receive, kept)
            finally:
                self.answers[f"{key} #{self._seen[key]}"] = _as_record(messages)

        RequestContext.__call__ = recorded  # type: ignore[method-assign, assignment]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test = item.name

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(self.answers, indent=1, sort_keys=True), encoding="utf-8")
        print(f"\n{len(self.answers)} answers in {self._file}")


def _as_record(messages: list[Any]) -> dict[str, str]:
    """Return status, headers and body of a response, or the messages of a WebSocket. Audio is stored as a digest."""
    lines, sound, body = [], b"", b""
    for message in messages:
        if "status" in message:
            shown = [
                f"{name.decode('latin-1')}: {value.decode('latin-1')}"
                for name, value in message.get("headers", ())
                if name.lower() not in _UNSTABLE_HEADERS
            ]
            lines += [str(message["status"]), *sorted(shown)]
        elif message["type"].endswith(".body"):
            body += message.get("body", b"")
        elif message.get("bytes") is not None:
            sound += message["bytes"]
        else:
            closing = f"{message['type']} {message.get('code', '')} {message.get('reason', '')}"
            lines.append(message.get("text") or closing)
    try:
        lines.append(body.decode())
    except UnicodeDecodeError:
        sound += body
    text = _MASKED.sub("~", "\n".join(lines))
    return {"text": hashlib.sha256(text.encode()).hexdigest(), "sound": _digest(sound), "shown": text[:_SHOWN]}


def _digest(content: bytes) -> str:
    return f"{len(content)} bytes {hashlib.sha256(content).hexdigest()}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--answers", type=Path, help="file in which tools.answers records the responses")


def pytest_configure(config: pytest.Config) -> None:
    file: Path | None = config.getoption("--answers")
    if file is not None:
        config.pluginmanager.register(_Recorder(file))


def speech(url: str) -> dict[str, NDArray[np.int64]]:
    """Return the PCM and codes of each seed."""
    found = {}
    for seed in range(NUM_SEEDS):
        asked = {"input": _TEXTS[seed % len(_TEXTS)], "seed": seed}
        pcm = _asked(f"{url}/v1/audio/speech", {**asked, "response_format": "pcm"})
        found[f"pcm of seed {seed}"] = np.frombuffer(pcm, "<i2").astype(np.int64)
        found[f"codes of seed {seed}"] = _codes(_asked(f"{url}/v1/audio/frames", asked))
        print(f"\rseed {seed + 1} of {NUM_SEEDS}", end="", flush=True)
    print()
    return found


def _asked(url: str, fields: dict[str, object]) -> bytes:
    request = urllib.request.Request(url, json.dumps(fields).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        content: bytes = answer.read()
        return content


def _codes(content: bytes) -> NDArray[np.int64]:
    """Return the codes of a stream of codec frames. The division into records depends on timing and is ignored."""
    stream = io.BytesIO(content)
    _, _, codebooks, *_ = HEADER.unpack(stream.read(HEADER.size))
    return np.concatenate([codes for _, _, codes in records(stream, codebooks)]).astype(np.int64)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return one line per difference, including responses found on only one side. PCM may differ by one step."""
    lines = []
    for key in sorted({*before, *after}):
        if key not in before or key not in after:
            lines.append(f"only {'after' if key in after else 'before'}: {key}")
            continue
        old, new = before[key], after[key]
        if isinstance(old, np.ndarray):
            if old.shape != new.shape or np.abs(old - new).max(initial=0) > key.startswith("pcm"):
                lines.append(f"differs: {key}")
        elif (old["text"], old["sound"]) != (new["text"], new["sound"]):
            lines.append(f"differs: {key}\n  - {old['shown']!r} {old['sound']}\n  + {new['shown']!r} {new['sound']}")
    return lines


def _read(file: str) -> Mapping[str, Any]:
    if file.endswith(".npz"):
        return dict(np.load(file))
    answers: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    return answers


def main(arguments: list[str]) -> int:
    match arguments:
        case ["speech", url, file]:
            np.savez_compressed(file, **speech(url))  # type: ignore[arg-type]
            return 0
        case ["compare", first, second]:
            before = _read(first)
            differences = compare(before, _read(second))
            print("\n".join([*differences, f"{len(differences)} of {len(before)} answers differ"]))
            return 1 if differences else 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

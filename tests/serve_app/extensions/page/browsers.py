"""Browsers that are driven by Node: where they are, and one scenario in one of them."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
MODULES = ROOT / ".pages"  # puppeteer-core and axe-core, which `make page` installs
SCENARIOS = Path(__file__).with_name("scripts") / "scenarios.mjs"
BOUND_S = 180
WAIT_MS = 60_000  # for one thing to be seen


def found(*names: str) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


CHROMIUM, FIREFOX = found("chromium", "chromium-browser", "google-chrome"), found("firefox-esr", "firefox")
IS_READY = CHROMIUM is not None and shutil.which("node") is not None and (MODULES / "node_modules").is_dir()


def starting(scenario: str, browser: str, url: str, options: Mapping[str, Any]) -> "subprocess.Popen[str]":
    """The scenario as a process that tells what it has seen in its last line."""
    paths = {"PAGES_MODULES": str(MODULES), "PAGES_CHROMIUM": CHROMIUM or "", "PAGES_FIREFOX": FIREFOX or ""}
    paths["PAGES_WAIT_MS"] = str(WAIT_MS)
    return subprocess.Popen(
        ["node", str(SCENARIOS), scenario, browser, url, json.dumps(options)],
        env={**os.environ, **paths}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def told(process: "subprocess.Popen[str]") -> dict[str, Any]:
    try:
        said, _ = process.communicate(timeout=BOUND_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # Puppeteer closes its browser, which a kill would leave running, and the scenario fails
        said, _ = process.communicate(timeout=BOUND_S)
    finally:
        process.kill()
    seen: dict[str, Any] = json.loads(said.splitlines()[-1])
    assert "error" not in seen, seen["error"] + "\n" + seen["states"]
    return seen


def seen_in(browser: str, scenario: str, url: str, **options: Any) -> dict[str, Any]:
    """What a scenario has seen, in a browser without an error in its console."""
    seen = told(starting(scenario, browser, url, options))
    assert seen.pop("faults") == []
    return seen

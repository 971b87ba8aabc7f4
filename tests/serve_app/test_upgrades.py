"""What version 0.2.0 stored is found by this version. `tests/data/upgrades/write_store.py` wrote the data."""

import hashlib
import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from pydantic import ValidationError

from serve_app.config import AccessSettings, AppConfig, ConfigError
from serve_app.config_file import explain, read_config
from serve_app.extensions.jobs.settings import JobSettings
from tests.serve_app.extensions.jobs.desk import Server, Speaker, until
from tools.house import settings
from tools.suites.rows import is_here

pytestmark = pytest.mark.anyio
DATA = Path(__file__).parents[1] / "data/upgrades/store-0.2.0.zip"
TOLD: dict[str, Any] = json.loads(ZipFile(DATA).read("told.json"))
JOBS = "/v1/audio/jobs"
UNFINISHED = dict.fromkeys(("running", "queued", "paused"), "completed")
AS_LONG_AS_GIT = JobSettings(retention_s=1e10)  # the data's jobs are never too old


@pytest.fixture
def speaker() -> Speaker:
    return Speaker()


@pytest.fixture
def server(tmp_path: Path, speaker: Speaker) -> Server:
    with ZipFile(DATA) as archive:
        archive.extractall(tmp_path)
    return Server(tmp_path / "store", speaker, AS_LONG_AS_GIT, AccessSettings(keys_file=tmp_path / "keys.json"))


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {TOLD['keys'][name]}"}


def kept(told: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """The old fields as the server returns them now. It may return more; `batch` was removed."""
    return {name: old[name] if name == "batch" else told.get(name) for name in old}


async def test_voices_consents_lexicons_and_keys_are_found(server: Server) -> None:
    for owner, paths in TOLD["paths"].items():
        for path, old in ((path, old) for path, old in paths.items() if is_here(path)):
            for name in (owner, "boss"):
                async with server.client(**bearer(name)) as client:
                    answer = await client.get(path)
                    assert (answer.status_code, kept(answer.json(), old)) == (200, old)
            others = ({"ada": "bob", "bob": "ada"}[owner], 404), ("gone", 401)
            for name, status in others:
                async with server.client(**bearer(name)) as client:
                    assert (await client.get(path)).status_code == status
    assert len([path for paths in TOLD["paths"].values() for path in paths]) == 4


async def test_jobs_of_every_state_are_found_and_end(
    server: Server, speaker: Speaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.start()
    async with server.client(**bearer("ada")) as client:
        for name, job in TOLD["jobs"].items():
            shown = (await client.get(f"{JOBS}/{job['shown']['id']}")).json()
            if name in UNFINISHED:
                job = {"shown": await until(client, shown, "completed")}
            assert kept(shown, job["shown"]) == job["shown"] or name in UNFINISHED
            if "pcm" in job:
                pcm = await client.get(f"{JOBS}/{shown['id']}/audio", params={"response_format": "pcm"})
                assert hashlib.sha256(pcm.content).hexdigest() == job["pcm"]
                assert (await client.get(f"{JOBS}/{shown['id']}/parts/0/words")).json() == job["words"]
        listed = {job["id"]: job["status"] for job in (await client.get(JOBS)).json()["data"]}
        for path in TOLD["removed"]:
            assert (await client.get(path)).status_code == 404
    await server.die()
    failed_at_once = f"job_{TOLD['removed'][3].rpartition('_')[2]}"  # a batch without a model
    ended = {job["shown"]["id"]: UNFINISHED.get(name, job["shown"]["status"]) for name, job in TOLD["jobs"].items()}
    assert listed == {**ended, failed_at_once: "failed"}
    spoken = sorted(request.text for request in speaker.requests)
    assert spoken == ["Later.", "Never begun.", "Wait for ever."]  # and not what was finished
    assert caplog.text.count("the folder files/ of the store contains data of OpenAI's files and batches") == 1
    assert len([file for file in (tmp_path / "store/files").rglob("file-*") if file.is_file()]) == 2
    removed = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert all(f"`{path.rpartition('/')[0]}`" in removed for path in TOLD["removed"])


@pytest.mark.parametrize("name", [name for name in ZipFile(DATA).namelist() if name.startswith("serve/")])
def test_a_configuration_of_then_works_or_names_the_new_setting(name: str, tmp_path: Path) -> None:
    file = Path(ZipFile(DATA).extract(name, tmp_path))
    if "jobs_pool:" in file.read_text(encoding="utf-8"):
        with pytest.raises(ConfigError, match=r"jobs_pool: write api\.jobs\.pool instead"):
            read_config(file)
    else:
        assert read_config(file)


# Settings of then that this version has not, but those of one of several models, which are as its own.
GONE = sorted({name for name in TOLD["settings"] if not name.startswith("models.")} - {*settings()})


@pytest.mark.parametrize("name", GONE)
def test_a_setting_of_then_is_known_or_fails_with_what_holds_instead(name: str) -> None:
    tree: Any = None
    for part in reversed(name.split(".")):
        tree = {part: tree}
    with pytest.raises(ValidationError) as raised:
        AppConfig.model_validate(tree)
    assert any(advice in explain(raised.value) for advice in ("delete this removed setting: ", "write api."))

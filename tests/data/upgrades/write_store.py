"""Write `store-0.2.0.zip`: a store, keys and configurations of version 0.2.0, and what its API told of the store.

    .venv/bin/python tests/data/upgrades/write_store.py

runs this file in a worktree of the commit 9fbf3d09, with the packages and the fakes of that commit.
"""

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

COMMIT = "9fbf3d09"
FILE = Path(__file__).with_name("store-0.2.0.zip")
JOBS, VOICES, CONSENTS = "/v1/audio/jobs", "/v1/audio/voices", "/v1/audio/voice_consents"
LEXICONS = "/pronunciation-dicts/"
ITEMS = [{"text": "SQL", "alias": "sequel"}, {"text": "Polish", "alias": "pole ish", "case_sensitive": True}]
ASKED = {"model": "tts-1", "voice": "ryan", "input": "A batch.", "response_format": "wav"}
LINE = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/audio/speech", "body": ASKED})


async def write(folder: Path) -> dict[str, object]:
    """The store and the key file in `folder`; what the server told of them."""
    from tests.serve_app.jobs.desk import Server, so
    from tests.serve_app.voices.speakers import Server as VoiceServer
    from tests.serve_app.voices.speakers import store, wav

    from deployments.errors import EngineError
    from serve_app.api.access.keys import revoke_keys
    from serve_app.config import AccessSettings, JobSettings
    from tools.house import settings

    letters = iter("ABCD")
    with patch("secrets.token_urlsafe", lambda _: next(letters) * 43):  # so that these keys are no secrets
        voices = VoiceServer(folder / "store", "ada", "bob", "gone", admins=("boss",))
    revoke_keys(folder / "keys.json", "gone")
    told: dict[str, Any] = {"keys": voices.keys, "settings": settings()}
    async with voices.client("ada") as ada, voices.client("bob") as bob:
        told["paths"] = paths = {"ada": {}, "bob": {}}
        recording = {"recording": ("c.wav", wav(1))}
        consent = await ada.post(CONSENTS, data={"name": "Ada agrees", "language": "en"}, files=recording)
        consent_id = consent.json()["id"]
        fields = {"ref_text": "Some hiss.", "language": "de", "consent": consent_id}
        voice = await store(ada, "Ada", **fields, lexicon=json.dumps({"SQL": "sequel"}))
        again = {"style": "calm", "ref_text": "More hiss.", "prepare": "none"}
        await ada.post(f"{VOICES}/{voice['id']}", data=again, files={"audio_sample": ("a.wav", wav(2))})
        lexicon = await ada.post(LEXICONS, json={"name": "it", "items": ITEMS})
        for path in (f"{CONSENTS}/{consent_id}", f"{VOICES}/{voice['id']}", LEXICONS + lexicon.json()["id"]):
            paths["ada"][path] = (await ada.get(path)).json()
        path = f"{VOICES}/{(await store(bob, 'Bob', seed=3))['id']}"
        paths["bob"][path] = (await bob.get(path)).json()

    speaker = halting()
    access = AccessSettings(keys_file=folder / "keys.json")
    server = Server(folder / "store", speaker, JobSettings(max_segments=1), access)
    server.start()
    async with server.client(authorization=f"Bearer {voices.keys['ada']}") as client:
        told["jobs"] = jobs = {}

        async def has(name: str, status: str, job_id: str) -> None:
            """Keeps what the server tells of a job with this status."""
            async with asyncio.timeout(20):
                while (shown := (await client.get(f"{JOBS}/{job_id}")).json())["status"] != status:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            jobs[name] = {"shown": shown}
            if status == "completed":
                pcm = await client.get(f"{JOBS}/{job_id}/audio", params={"response_format": "pcm"})
                words = await client.get(f"{JOBS}/{job_id}/parts/0/words")
                jobs[name] |= {"pcm": hashlib.sha256(pcm.content).hexdigest(), "words": words.json()}

        async def job(status: str, *texts: str, after: str = "", **fields: object) -> str:
            body = {"voice": "ryan", "inputs": [{"input": text} for text in texts], **fields}
            job_id: str = (await client.post(JOBS, json=body)).json()["id"]
            if after:
                await so(lambda: speaker.running == 1)
                await client.post(f"{JOBS}/{job_id}/{after}")
            await has(status, status, job_id)
            return job_id

        await job("completed", "One two. Three four.", "Five.", lexicon={"five": "fife"})
        speaker.errors = [EngineError("broken")] * 3
        await job("failed", "Broken.")
        await job("cancelled", "Wait to be stopped.", after="cancel")
        told["removed"] = [*await batch(client, LINE), *await batch(client, "{}")]  # the second one fails at once
        [made] = [each["id"] for each in (await client.get(JOBS)).json()["data"] if each["id"] not in str(jobs)][-1:]
        await has("batch", "completed", made)
        running = await job("running", "Made.", "Wait for ever.")
        await so(lambda: len(list((folder / "store/segments" / running).glob("*"))) == 1)
        await has("running", "running", running)
        await job("queued", "Never begun.")
        server.hindrance = "the talkers are busy"
        await job("paused", "Later.")
    await server.die()
    return told


def halting() -> Any:
    """A voice that never ends a text which begins with Wait."""
    from tests.serve_app.jobs.desk import Speaker

    class Halting(Speaker):  # type: ignore[misc, valid-type]
        async def synthesize(self, request: Any, info: object = None) -> AsyncGenerator[Any, None]:
            if not request.text.startswith("Wait"):
                async for chunk in super().synthesize(request, info):
                    yield chunk
                return
            self.running += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.running -= 1

    return Halting()


async def batch(client: Any, content: str) -> list[str]:
    """The paths of a batch, and of its file."""
    sent = {"file": ("texts.jsonl", content.encode(), "application/jsonl")}
    file = (await client.post("/v1/files", data={"purpose": "batch"}, files=sent)).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/audio/speech", "completion_window": "24h"}
    made = (await client.post("/v1/batches", json=asked)).json()
    return [f"/v1/files/{file['id']}", f"/v1/batches/{made['id']}"]


def inside() -> None:
    """In the worktree: writes the zip file."""
    with TemporaryDirectory() as name, ZipFile(FILE, "w", ZIP_DEFLATED) as archive:
        told = asyncio.run(write(Path(name)))
        shutil.copytree("cluster/serve", Path(name, "serve"))
        Path(name, "told.json").write_text(json.dumps(told, indent=1, sort_keys=True), encoding="utf-8")
        for file in sorted(file for file in Path(name).rglob("*") if file.is_file()):
            archive.writestr(ZipInfo(file.relative_to(name).as_posix()), file.read_bytes(), ZIP_DEFLATED)


def main() -> None:
    root = FILE.parents[3]
    with TemporaryDirectory() as name:
        tree = Path(name, "tree")
        subprocess.run(["git", "worktree", "add", "--detach", tree, COMMIT], cwd=root, check=True)
        try:
            command = [sys.executable, __file__, "inside"]
            subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, check=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=root, check=True)


if __name__ == "__main__":
    inside() if sys.argv[1:] else main()

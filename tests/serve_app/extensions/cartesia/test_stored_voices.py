from pathlib import Path

import pytest

from tests.serve_app.extensions.voices.speakers import Server, wav

pytestmark = pytest.mark.anyio


async def test_a_voice_is_stored_spoken_with_and_deleted(tmp_path: Path) -> None:
    client = Server(tmp_path / "store").client()
    fields = {"name": "ada", "language": "en", "mode": "similarity"}
    told = await client.post("/voices/clone", data=fields, files={"clip": ("clip.wav", wav())})
    assert told.json()["is_owner"] is True
    assert "mode" in told.headers["x-ignored"]
    spoken = await client.post("/tts/bytes", json={"transcript": "Hi.", "voice": {"id": told.json()["id"]}})
    assert spoken.status_code == 200
    assert (await client.delete(f"/voices/{told.json()['id']}")).status_code == 204

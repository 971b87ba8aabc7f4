from pathlib import Path

import pytest

from tests.serve_app.extensions.voices.speakers import Server, wav

pytestmark = pytest.mark.anyio


async def test_a_voice_is_stored_changed_and_deleted(tmp_path: Path) -> None:
    client = Server(tmp_path / "store").client()
    files = [("files", ("main.wav", wav())), ("files", ("whispering.wav", wav(1)))]
    fields = {"name": "ada", "description": "calm", "labels": '{"language": "de"}', "remove_background_noise": "true"}
    told = await client.post("/v1/voices/add", data=fields, files=files)
    assert told.json()["requires_verification"] is False
    assert "remove_background_noise" in told.headers["x-ignored"]
    path = f"/v1/voices/{told.json()['voice_id']}"
    shown = (await client.get(path)).json()
    assert (shown["category"], shown["labels"]["language"]) == ("cloned", "de")
    own = (await client.get(f"/v1/audio/voices/{told.json()['voice_id']}")).json()
    assert [take["style"] for take in own["takes"]] == ["neutral", "whispering"]
    assert (await client.post(f"{path}/edit", data={"name": "grace"})).json() == {"status": "ok"}
    assert (await client.get(path)).json()["name"] == "grace"
    assert (await client.delete(path)).json() == {"status": "ok"}

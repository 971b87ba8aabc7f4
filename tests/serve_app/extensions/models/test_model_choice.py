"""Which of several models answers: the list of docs/models.md, row by row."""

from dataclasses import replace
from typing import Any

import pytest

from deployments.errors import InvalidRequest, ModelNotFound, NotFound
from deployments.protocol import ModelInfo
from serve_app.api.application import create_api
from serve_app.config import AdmissionSettings, ApiSettings
from serve_app.extensions.models.model_choice import ModelHints, choose_model
from serve_app.extensions.voices.library import Voices
from serve_app.extensions.voices.settings import VoiceSettings
from tests.serve_app import fake
from tests.serve_app.one_model import client_of
from tools.suites.row import PostRow
from tools.suites.rows import POSTS

SETTINGS = ApiSettings()
CUSTOM = replace(fake.CUSTOM_VOICE, name="custom", checkpoint="Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice")
SMALL = replace(CUSTOM, name="small", checkpoint="Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice")
NORA = replace(CUSTOM, name="embedded", checkpoint="embedded", voices=("nora", "felix"))
BASE = replace(fake.BASE, name="clone", checkpoint="/checkpoints/Base")
DESIGN = replace(fake.VOICE_DESIGN, name="design", checkpoint="d")
ALL = (CUSTOM, BASE, DESIGN)


def chosen(models: tuple[ModelInfo, ...] = ALL, *, lenient: bool = False, **wanted: Any) -> str:
    return choose_model(ModelHints(**wanted), models, SETTINGS, lenient=lenient).name


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ({}, "custom"),
        ({"model": "tts-1"}, "custom"),
        ({"model": "clone", "voice": "vivian", "instructions": "Calm."}, "clone"),
        ({"model": "/checkpoints/Base"}, "clone"),
        ({"model": "Base"}, "clone"),
        ({"model": "qwen3-tts-clone", "voice": "alloy"}, "clone"),
        ({"model": "custom", "has_recording": True}, "custom"),  # which then says that it does not clone
        ({"model": "tts-1", "has_recording": True, "voice": "alloy"}, "clone"),
        ({"has_recording": True, "task_type": "CustomVoice"}, "clone"),
        ({"task_type": "VoiceDesign", "voice": "vivian"}, "design"),
        ({"task_type": "base"}, "clone"),
        ({"voice": "Vivian", "instructions": "Calm."}, "custom"),
        ({"voice": "alloy", "instructions": "Calm."}, "custom"),
        ({"instructions": "Calm."}, "design"),
        ({"model": "tts-1-hd", "instructions": "Calm."}, "design"),
        ({"instructions": ""}, "custom"),
        # Clients of other services cannot know our names.
        ({"model": "eleven_turbo_v2", "voice": "rachel", "lenient": True}, "custom"),
        ({"model": "eleven_turbo_v2", "voice": "rachel", "has_recording": True, "lenient": True}, "clone"),
    ],
)
def test_the_first_that_decides(wanted: dict[str, Any], name: str) -> None:
    assert chosen(**wanted) == name


@pytest.mark.parametrize(
    ("models", "wanted", "name"),
    [
        ((BASE, CUSTOM), {}, "clone"),  # the first is the default
        ((BASE, CUSTOM), {"voice": "alloy"}, "custom"),
        ((SMALL, CUSTOM), {"voice": "vivian"}, "small"),  # both have it: the default
        ((CUSTOM, NORA), {"voice": "nora"}, "embedded"),
        ((CUSTOM, NORA), {"voice": "alloy"}, "custom"),
        ((CUSTOM, replace(SMALL, name="tts-1")), {"model": "tts-1"}, "tts-1"),  # a name goes before an alias
        ((BASE, replace(SMALL, name="qwen3-tts-clone")), {"model": "qwen3-tts-clone"}, "qwen3-tts-clone"),
        ((BASE, DESIGN), {"voice": "alloy", "instructions": "Calm."}, "design"),  # nobody has named voices
        (
            (BASE,),
            {"voice": "vivian", "task_type": "Sing", "model": "gpt-9"},
            "clone",
        ),  # the only one says what it lacks
    ],
)
def test_the_default_decides_among_equals(models: tuple[ModelInfo, ...], wanted: dict[str, Any], name: str) -> None:
    assert chosen(models, **wanted) == name


@pytest.mark.parametrize(
    ("models", "wanted", "param", "said"),
    [
        ((CUSTOM, DESIGN), {"has_recording": True}, "ref_audio", "a Base checkpoint"),
        ((CUSTOM, DESIGN), {"model": "qwen3-tts-clone"}, "model", "a Base checkpoint"),
        ((CUSTOM, BASE), {"task_type": "VoiceDesign"}, "task_type", "a VoiceDesign checkpoint"),
        ((CUSTOM, BASE), {"instructions": "Calm."}, "instructions", "a VoiceDesign checkpoint"),
        (ALL, {"task_type": "Sing"}, "task_type", "CustomVoice, VoiceDesign or Base"),
        (ALL, {"task_type": 3}, "task_type", "CustomVoice, VoiceDesign or Base"),
        (ALL, {"voice": "nobody"}, "voice", "vivian"),
        ((DESIGN, CUSTOM, SMALL), {"voice": "vivian"}, "model", "(custom, small)"),
        ((CUSTOM, BASE, replace(BASE, name="other")), {"has_recording": True}, "model", "(clone, other)"),
    ],
)
def test_what_is_unclear_is_named(models: tuple[ModelInfo, ...], wanted: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chosen(models, **wanted)
    assert refused.value.param == param
    assert said in str(refused.value)


def test_a_stored_voice_that_is_gone_is_no_name_to_ignore() -> None:
    name = f"voice_{'0' * 24}"
    lost = Voices(None, VoiceSettings()).missing(name)
    with pytest.raises(NotFound) as refused:
        chosen((DESIGN, BASE), voice=name, lost_voice=lost)
    assert refused.value.param == "voice"


def test_a_model_that_is_not_here() -> None:
    with pytest.raises(ModelNotFound, match="Available: custom, clone, design, tts-1"):
        chosen(model="gpt-9")


@pytest.mark.anyio
@pytest.mark.parametrize(
    "row", [row for row in POSTS.values() if row.name in ("ElevenLabs", "Cartesia", "VoxServe", "Deepgram")]
)
async def test_other_dialects_have_task_type_too(row: PostRow) -> None:
    """Their clients add it to the body; VoiceDesign then misses instructions."""
    path, body = row.sample.filled(voice="x").path, row.body(voice="x")
    speaking = {
        info.name: (fake.FakeSynthesizer(info, script=fake.utterance()), AdmissionSettings())
        for info in (CUSTOM, DESIGN)
    }
    async with client_of(create_api(speaking, SETTINGS, opened={})) as client:
        known = await client.post(path, json={**body, "task_type": "CustomVoice"})
        assert known.status_code == 200
        assert "task_type" not in known.headers.get("x-ignored", "")
        assert "instructions is required" in (await client.post(path, json={**body, "task_type": "VoiceDesign"})).text
        assert "task_type: 'Sing' is not" in (await client.post(path, json={**body, "task_type": "Sing"})).text

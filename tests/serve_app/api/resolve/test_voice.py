"""Who speaks for a name: every kind of model, with and without the voice, strictly and leniently."""

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.errors import InvalidRequest
from deployments.protocol import ModelInfo
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.resolve.voice import choose_voice
from serve_app.api.voice_source import ChosenVoice, VoiceSource
from tests.serve_app.fake import BASE, CUSTOM_VOICE, VOICE_DESIGN

pytestmark = pytest.mark.anyio

ADA = SimpleNamespace(id="voice_1", name="Ada", language=None)
BEA = SimpleNamespace(id="voice_2", name="Bea", language=None)
FIRST = CUSTOM_VOICE.voices[0]
BEA_SPEAKS = "unknown voice, used Bea"
NO_NAMES = "the loaded model has no named voices"
NO_CLONES = "a stored voice, {} does not clone voices: load a Base checkpoint"


class Kept(VoiceSource):
    """Ada and Bea."""

    async def find(self, id_or_name: str | None) -> Any:
        return self.known(id_or_name)

    def known(self, id_or_name: str | None) -> Any:
        return {"ada": ADA, "bea": BEA}.get((id_or_name or "").lower())


async def chosen(info: ModelInfo, named: object, *, lenient: bool, default: str | None, audio: bool) -> ChosenVoice:
    body = SpeechBody.model_construct(ref_audio=b"" if audio else None)
    return await choose_voice(Kept(), named, body, info, default=default, lenient=lenient)


@pytest.mark.parametrize(
    ("info", "named", "default", "audio", "lenient", "strict"),
    [
        # A model with speakers.
        (CUSTOM_VOICE, "RYAN", None, False, ("ryan", None, None), ("ryan", None, None)),
        (CUSTOM_VOICE, None, None, False, (FIRST, None, None), (FIRST, None, None)),
        (CUSTOM_VOICE, None, "ryan", False, ("ryan", None, None), ("ryan", None, None)),
        (CUSTOM_VOICE, None, "nobody", False, (FIRST, None, None), (FIRST, None, None)),
        (CUSTOM_VOICE, "", "ryan", False, ("ryan", None, None), "Unknown voice ''"),
        (CUSTOM_VOICE, "x", "ryan", False, ("ryan", None, "unknown voice, used ryan"), "Unknown voice 'x'"),
        (CUSTOM_VOICE, 5, "ryan", False, ("ryan", None, "not a name"), ("ryan", None, "not a name")),
        (CUSTOM_VOICE, "ada", None, False, (FIRST, None, NO_CLONES), f"voice: 'ada' is {NO_CLONES}."),
        # One that designs its voice.
        (VOICE_DESIGN, None, "ryan", False, (None, None, None), (None, None, None)),
        (VOICE_DESIGN, "", "ryan", False, (None, None, None), (None, None, None)),
        (VOICE_DESIGN, "x", None, False, (None, None, NO_NAMES), (None, None, NO_NAMES)),
        (VOICE_DESIGN, 5, None, False, (None, None, "not a name"), (None, None, "not a name")),
        (VOICE_DESIGN, "ada", None, False, (None, None, NO_CLONES), (None, None, NO_CLONES)),
        # One that clones.
        (BASE, "ADA", "bea", False, ("ADA", ADA, None), ("ADA", ADA, None)),
        (BASE, None, "bea", False, ("voice_2", BEA, None), ("voice_2", BEA, None)),
        (BASE, None, None, False, (None, None, None), (None, None, None)),
        (BASE, "x", "bea", False, ("voice_2", BEA, BEA_SPEAKS), ("x", None, None)),
        (BASE, "x", "nobody", False, ("x", None, NO_NAMES), ("x", None, None)),
        (BASE, 5, None, False, (None, None, "not a name"), (None, None, "not a name")),
        (BASE, 5, "bea", False, ("voice_2", BEA, BEA_SPEAKS), ("voice_2", BEA, BEA_SPEAKS)),
        (BASE, "ada", "bea", True, ("ada", None, NO_NAMES), ("ada", None, NO_NAMES)),
        (BASE, None, "bea", True, (None, None, None), (None, None, None)),
    ],
)  # fmt: skip
async def test_who_speaks(
    info: ModelInfo, named: object, default: str | None, audio: bool, lenient: tuple[Any, ...], strict: Any
) -> None:
    asked = {"default": default, "audio": audio}

    def expected(row: tuple[Any, ...]) -> ChosenVoice:
        name, stored, reason = row
        return ChosenVoice(name, stored, reason and reason.format(info.name), default=None if named else name)

    assert await chosen(info, named, lenient=True, **asked) == expected(lenient)  # type: ignore[arg-type]
    if isinstance(strict, tuple):
        assert await chosen(info, named, lenient=False, **asked) == expected(strict)  # type: ignore[arg-type]
        return
    with pytest.raises(InvalidRequest) as raised:
        await chosen(info, named, lenient=False, **asked)  # type: ignore[arg-type]
    assert (raised.value.param, strict.format(info.name) in raised.value.message) == ("voice", True)

from dataclasses import replace

import httpx
import pytest

from deployments.errors import InvalidRequest, StartError
from serve_app.api import catalogue
from serve_app.config import ApiSettings
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer

pytestmark = pytest.mark.anyio

RELEASED_SPEAKERS = tuple(catalogue.RELEASED)


@pytest.mark.parametrize("characters", [catalogue.RELEASED, catalogue.EMBEDDED])
def test_openai_names_keep_their_gender(characters: dict[str, catalogue.Character]) -> None:
    female = {"alloy", "coral", "marin", "nova", "sage", "shimmer"}
    genders = {
        name: characters[catalogue.find_speaker(name.upper(), tuple(characters))].gender for name in catalogue.ALIASES
    }
    assert genders == {name: "female" if name in female else "male" for name in catalogue.ALIASES}
    assert len(catalogue.ALIASES) == 13
    assert set(catalogue.aliases(tuple(catalogue.EMBEDDED)).values()) == set(catalogue.EMBEDDED)
    assert not {"eric", "dylan"} & set(catalogue.aliases(RELEASED_SPEAKERS).values()), "they force a dialect"


def test_openai_names_spread_over_other_speakers_by_order() -> None:
    known = catalogue.aliases(("one", "two", "three"))
    assert list(known.values())[:4] == ["one", "two", "three", "one"]
    assert set(known) == set(catalogue.ALIASES)
    assert catalogue.voice_list(replace(CUSTOM_VOICE, voices=())) == []


def test_a_speaker_is_found_in_any_case_also_where_it_is_named_like_an_alias() -> None:
    assert catalogue.find_speaker("Uncle_Fu", RELEASED_SPEAKERS) == "uncle_fu"
    assert catalogue.find_speaker("Nova", ("other", "nova")) == "nova"
    assert [voice.id for voice in catalogue.voice_list(replace(CUSTOM_VOICE, voices=("other", "nova")))].count(
        "nova"
    ) == 1


@pytest.mark.parametrize("name", ["", "nobody", "vivian "])
def test_an_unknown_voice_lists_the_valid_ones(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"vivian, .*, alloy, ") as raised:
        catalogue.find_speaker(name, RELEASED_SPEAKERS)
    assert (raised.value.param, raised.value.code) == ("voice", "voice_not_found")


async def test_every_embedded_voice_is_described(client: httpx.AsyncClient, synthesizer: FakeSynthesizer) -> None:
    synthesizer.info = replace(CUSTOM_VOICE, name="embedded", voices=tuple(catalogue.EMBEDDED))
    for voice in (await client.get("/v1/audio/voices")).json()["voices"]:
        assert voice["language"] == "english"
        assert voice["gender"] in ("female", "male")
        assert voice["description"]


def test_a_default_voice_may_be_stored_where_a_model_clones() -> None:
    settings = ApiSettings(default_voice="ada")
    catalogue.check_default(settings, "any model", ["ryan"], clones=True)
    with pytest.raises(StartError, match="'ada' is not a voice of m; set one of ryan"):
        catalogue.check_default(settings, "m", ["ryan"], clones=False)

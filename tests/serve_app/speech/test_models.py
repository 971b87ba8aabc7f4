"""Several models behind one port: what one of them cannot do now holds nobody up who wants another one."""

import asyncio
import time
from dataclasses import replace

import httpx
import pytest

from deployments.errors import TalkerLost
from deployments.protocol import ModelKind
from deployments.serving import metrics
from deployments.serving.reports import Start
from serve_app.api.application import create_api
from serve_app.config import AdmissionSettings, ApiSettings
from serve_app.extension import Node
from serve_app.extensions.voices.extension import open_voices
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.speech.model_state import ModelState, ModelStatus
from tests.serve_app.fake import BASE, CUSTOM_VOICE, VOICE_DESIGN, FakeSynthesizer, utterance
from tests.serve_app.one_model import client_of, refusal
from tools.suites.rows import is_here

pytestmark = pytest.mark.anyio

READY = ModelState(ModelStatus.READY)
SPEECH = "/v1/audio/speech"
BODY = {"input": "Hello.", "response_format": "pcm"}


class Several:
    """A server of three models, whose states a test sets."""

    def __init__(self, **admission: float) -> None:
        infos = {"custom": CUSTOM_VOICE, "clone": BASE, "design": VOICE_DESIGN}
        self.speakers = {
            name: FakeSynthesizer(replace(info, name=name, checkpoint=f"Qwen/{name}"), utterance())
            for name, info in infos.items()
        }
        self.states = dict.fromkeys(infos, READY)
        settings = AdmissionSettings.model_validate(admission)

        def is_running(model: str) -> bool:
            return self.states[model].status is ModelStatus.READY

        node = Node(is_running, lambda: True, lambda: b"", state=lambda model: self.states[model])
        served = {name: (each, settings) for name, each in self.speakers.items()}
        self.voices = open_voices(VoiceSettings())
        api = create_api(served, ApiSettings(), node=node, opened={"voices": self.voices})
        self.http = client_of(api, raises=False)

    async def speak(self, **fields: object) -> httpx.Response:
        return await self.http.post(SPEECH, json={**BODY, **fields})

    @property
    def asked(self) -> dict[str, int]:
        return {name: len(each.requests) for name, each in self.speakers.items()}


@pytest.fixture
def server() -> Several:
    return Several()


async def test_a_request_reaches_its_model(server: Several) -> None:
    assert (await server.speak(voice="vivian")).status_code == 200
    assert (await server.speak(instructions="Calm.")).status_code == 200
    assert server.asked == {"custom": 1, "clone": 0, "design": 1}
    assert server.speakers["design"].requests[0].model == "design"


async def test_a_voice_of_a_model_costs_no_look_at_the_store(server: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[float]()

    async def refresh(**when: float) -> None:
        looks.append(time.monotonic())

    monkeypatch.setattr(server.voices, "refresh", refresh)  # a server of an earlier test may still look
    assert (await server.speak(voice="vivian")).status_code == 200
    assert looks == []
    assert (await server.speak(voice="nobody")).status_code == 400
    assert len(looks) > 0


async def test_a_voice_leads_to_its_model(server: Several) -> None:
    server.speakers["clone"].info = replace(CUSTOM_VOICE, name="clone", checkpoint="c", voices=("nora",))
    assert (await server.speak(voice={"id": "NORA"})).headers["x-voice"] == "nora"
    for path in filter(is_here, ["/tts/bytes"]):  # a model that the request names has any voice
        await server.http.post(path, json={"transcript": "Hi.", "voice": {"id": "rachel"}, "model_id": "clone"})
        assert server.asked["clone"] == 2


async def test_task_type_has_an_effect_where_there_are_several(server: Several) -> None:
    answer = await server.speak(voice="vivian", task_type="VoiceDesign", instructions="Calm.")
    assert answer.headers["x-ignored"] == "voice (the loaded model has no named voices)"
    assert server.asked["design"] == 1


async def test_a_model_that_starts_closes_no_door_for_the_others() -> None:
    server = Several(start_wait_s=0.05)
    server.states["design"] = ModelState(ModelStatus.LOADING, "recording GPU work", 40, 11.2)
    server.speakers["design"].script = [asyncio.Event()]
    refused = await server.speak(instructions="Calm.")
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "12"
    assert "The model design is not ready: loading, 40 %." in refused.json()["error"]["message"]
    assert (await server.speak(voice="vivian")).status_code == 200
    ready = await server.http.get("/ready")
    assert ready.status_code == 200
    assert ready.json()["models"]["design"] == {"state": "loading", "percent": 40, "stage": "recording GPU work"}
    assert (await server.http.get("/ready", params={"model": "custom"})).status_code == 200
    missing = await server.http.get("/ready", params={"model": "design"})
    assert (missing.status_code, missing.headers["retry-after"]) == (503, "12")


async def test_a_model_at_zero_is_ready_and_started_by_its_first_request(server: Several) -> None:
    server.states["design"] = ModelState(ModelStatus.AT_ZERO, ready_in_s=20.0)
    assert (await server.http.get("/ready", params={"model": "design"})).status_code == 200
    assert (await server.speak(instructions="Calm.")).status_code == 200


async def test_a_model_whose_start_failed_is_refused_at_once_and_says_why(server: Several) -> None:
    server.states["design"] = ModelState(ModelStatus.FAILED, "too little GPU memory", ready_in_s=20.0)
    refused = await server.speak(instructions="Calm.")
    assert refused.status_code == 503
    assert "its start failed, see /v1/models for the reason" in refused.json()["error"]["message"]
    assert server.asked["design"] == 0
    models = (await server.http.get("/v1/models")).json()["data"]
    [design] = [each for each in models if each["id"] == "design"]
    told = {"state": "failed", "stage": "too little GPU memory", "kind": ModelKind.VOICE_DESIGN}
    assert design.items() >= told.items()


async def test_a_failed_default_model_leaves_the_others_open(server: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    monkeypatch.setattr(metrics.REFUSALS, "record", lambda _, *, reason, model: refused.append(f"{model}: {reason}"))
    server.states["custom"] = ModelState(ModelStatus.FAILED, "too little GPU memory", ready_in_s=20.0)
    assert (await server.speak(instructions="Calm.")).status_code == 200
    assert refused == []  # a question is no refusal
    assert (await server.speak(voice="vivian")).status_code == 503
    assert refused == ["custom: starting"]


async def test_no_model_is_ready_while_all_load(server: Several) -> None:
    for name in server.states:
        server.states[name] = ModelState(ModelStatus.LOADING, "loading the talker", 10, 9.0)
    refused = await server.http.get("/ready")
    assert refused.status_code == 503
    assert "design is loading (10 %): loading the talker" in refused.json()["error"]["message"]


async def test_a_model_that_cannot_be_described_yet_is_listed_by_its_name(server: Several) -> None:
    server.speakers["clone"].info = None
    server.states["clone"] = ModelState(ModelStatus.LOADING, "downloading", 3, 60.0)
    listed = {each["id"]: each for each in (await server.http.get("/v1/models")).json()["data"]}
    assert (listed["clone"]["state"], listed["clone"]["percent"]) == ("loading", 3)
    assert "kind" not in listed["clone"]
    assert (listed["custom"]["kind"], listed["custom"]["root"]) == ("custom_voice", "Qwen/custom")
    assert (await server.speak(voice="vivian")).status_code == 200


async def test_a_model_that_fails_is_not_left_out(server: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> None:
        raise TalkerLost("it has died")

    monkeypatch.setattr(server.speakers["clone"], "describe", fail)
    for path in ("/v1/models", "/v1/audio/voices"):
        assert refusal(await server.http.get(path), "code") == (503, "replica_lost"), path


async def test_each_model_has_its_own_limit() -> None:
    server = Several(max_streams=1)
    hold = asyncio.Event()
    server.speakers["custom"].script = [hold]
    holding = asyncio.create_task(server.speak(voice="vivian"))
    await server.speakers["custom"].waiting.wait()
    assert (await server.speak(voice="vivian")).status_code == 429
    assert (await server.speak(instructions="Calm.")).status_code == 200
    hold.set()
    await holding


async def test_the_voices_of_all_models_are_listed(server: Several) -> None:
    voices = (await server.http.get("/v1/audio/voices")).json()["voices"]
    ids = [voice["id"] for voice in voices]
    assert "vivian" in ids
    assert len(ids) == len(set(ids))


BEGUN = Start(100.0, "compiling", usual_s=20.0)


@pytest.mark.parametrize(
    ("start", "wanted", "running", "expected"),
    [
        (BEGUN, 1, True, READY),
        (replace(BEGUN.ended(112.0), is_asleep=True), 1, True, ModelState(ModelStatus.ASLEEP)),
        (None, 0, False, ModelState(ModelStatus.AT_ZERO, ready_in_s=25.0)),
        (BEGUN.ended(112.0), 0, False, ModelState(ModelStatus.AT_ZERO, ready_in_s=12.0)),
        (BEGUN, 1, False, ModelState(ModelStatus.LOADING, "compiling", 50, 10.0)),
        (replace(BEGUN, began_s=1.0), 1, False, ModelState(ModelStatus.LOADING, "compiling", 99, 1.0)),
        (None, 1, False, ModelState(ModelStatus.LOADING, "waiting for resources", 0, 25.0)),
        (BEGUN.ended(104.0, failed="no memory"), 1, False, ModelState(ModelStatus.FAILED, "no memory", None, 20.0)),
        (BEGUN.ended(112.0).next(110.0), 1, False, ModelState(ModelStatus.LOADING, "starting", 0, 12.0)),
    ],
)
def test_states_of_a_model(start: Start | None, wanted: int, running: bool, expected: ModelState) -> None:
    assert ModelState.of(start, wanted=wanted, running=running, now_s=110.0) == expected


def test_a_note_of_a_start_is_read_as_it_was_written() -> None:
    assert Start.read(BEGUN.ended(110.0).note()) == BEGUN.ended(110.0)
    assert Start.read(None) is None

"""What is measured of a stream, with instruments that only remember."""

import contextvars
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import httpx
import numpy as np
import pytest

from deployments.errors import Overloaded
from deployments.protocol import FinishReason, PcmChunk, SynthesisRequest
from deployments.serving import metrics
from serve_app.api.access.callers import EVERYBODY, STRANGER, VISITOR, Visitor
from serve_app.api.application import visible
from serve_app.config import AdmissionSettings, ApiSettings
from serve_app.extension import Node
from serve_app.speech.segments import Utterance
from serve_app.speech.speech_models import SpeechModel
from tests.clock import Clock
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, chunk, utterance
from tests.serve_app.one_model import client_of, one_api

pytestmark = pytest.mark.anyio

BODY = {"model": "qwen3-tts", "input": "Hello.", "voice": "alloy", "response_format": "pcm"}


OURS = "# HELP ray_talkray_x Ours.\n# TYPE ray_talkray_x gauge\nray_talkray_x 1\n"
EXPORTED = f'# HELP ray_tasks Of ray_talkray_x.\nray_tasks{{Name="ray_talkray_x"}} 1\n{OURS}ray_serve_talkray_x 1\n'
REQUEST = Utterance(SynthesisRequest("id", "Hello."))


class Timed(FakeSynthesizer):
    """Brings each chunk at a time of its own."""

    def __init__(self, clock: Clock, times_s: list[float], script: Sequence[PcmChunk]) -> None:
        super().__init__(script=script)
        self.clock, self.times_s = clock, times_s

    async def synthesize(self, request: SynthesisRequest, info: object = None) -> AsyncGenerator[PcmChunk, None]:
        async for item in super().synthesize(request):
            self.clock.now_s = self.times_s.pop(0)
            yield item


class Instrument:
    def __init__(self) -> None:
        self.values: list[float] = []
        self.tags: list[dict[str, str]] = []

    def record(self, value: float, **tags: str) -> None:
        self.values.append(value)
        self.tags.append(tags)


@pytest.fixture
def instruments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Instrument]:
    names = "STALLS TTFB TTFP TTFA ONSET LATENESS UNDERRUNS AUDIO RTF REFUSALS STREAMS ENDINGS".split()  # noqa: SIM905
    made = {name: Instrument() for name in names}
    for name, instrument in made.items():
        monkeypatch.setattr(metrics, name, instrument)
    return made


async def hear(synthesizer: FakeSynthesizer) -> None:
    async for _ in SpeechModel(synthesizer, AdmissionSettings()).speak(REQUEST, CUSTOM_VOICE):
        pass


async def test_a_player_without_a_buffer(instruments: dict[str, Instrument], clock: Clock) -> None:
    second = CUSTOM_VOICE.sample_rate * 2
    script = [chunk(bytes(int(second * audio_s))) for audio_s in (1.0, 0.5, 1.0, 0.1)]
    synthesizer = Timed(clock, [10.0, 10.5, 12.0, 12.9], script)  # plays until 11.0, 11.5, and once more until 13.0
    await hear(synthesizer)
    assert instruments["TTFP"].values == [0.5]
    assert instruments["LATENESS"].values == pytest.approx([0.0, 0.0, 0.5, 0.0])
    assert len(instruments["UNDERRUNS"].values) == 1
    assert instruments["STALLS"].values == pytest.approx([0.5])
    assert sum(instruments["AUDIO"].values) == pytest.approx(2.6)
    assert instruments["RTF"].values == pytest.approx([3.4 / 2.6])


async def test_a_stream_that_is_left_has_pauses_and_no_ending(instruments: dict[str, Instrument], clock: Clock) -> None:
    second = CUSTOM_VOICE.sample_rate * 2
    synthesizer = Timed(clock, [10.0, 12.0, 12.5], [chunk(bytes(second)) for _ in range(3)])
    async with aclosing(SpeechModel(synthesizer, AdmissionSettings()).speak(REQUEST, CUSTOM_VOICE)) as chunks:
        await anext(chunks)
        await anext(chunks)
    assert instruments["STALLS"].values == pytest.approx([1.0])
    assert instruments["RTF"].values == instruments["ENDINGS"].values == []


async def test_the_first_audible_sample(instruments: dict[str, Instrument], clock: Clock) -> None:
    rate = CUSTOM_VOICE.sample_rate
    loud = np.full(rate // 10, 3000, "<i2").tobytes()
    script = [chunk(bytes(rate // 2)), chunk(bytes(rate // 5) + loud), chunk(loud)]  # 0.25 and 0.1 s of silence first
    await hear(Timed(clock, [10.0, 10.2, 10.4], script))
    assert instruments["TTFP"].values == [0.5]
    assert instruments["TTFA"].values == pytest.approx([0.7])
    assert instruments["ONSET"].values == pytest.approx([0.35])


async def test_a_reader_who_takes_time_makes_nothing_late(instruments: dict[str, Instrument], clock: Clock) -> None:
    async for _ in SpeechModel(FakeSynthesizer(script=utterance(5)), AdmissionSettings()).speak(REQUEST, CUSTOM_VOICE):
        clock.now_s += 1.0
    assert instruments["LATENESS"].values == [0.0] * 5


async def test_a_stream_without_audio_has_no_rtf(instruments: dict[str, Instrument]) -> None:
    await hear(FakeSynthesizer(script=utterance(0)))
    assert instruments["RTF"].values == instruments["TTFP"].values == []


async def ask(synthesizer: FakeSynthesizer, path: str = "/v1/audio/speech") -> httpx.Response:
    node = Node(is_running=lambda model: True, is_ready=lambda: True, scrape=EXPORTED.encode)
    async with client_of(one_api(synthesizer, ApiSettings(), node=node)) as client:
        return await (client.get(path) if path.startswith("/metrics") else client.post(path, json=BODY))


async def test_one_first_byte_for_each_answer_with_speech(instruments: dict[str, Instrument]) -> None:
    assert (await ask(FakeSynthesizer(script=utterance(3)))).status_code == 200
    assert len(instruments["TTFB"].values) == len(instruments["TTFP"].values) == len(instruments["RTF"].values) == 1
    assert instruments["STREAMS"].values == [1, 0]


async def test_a_refusal_is_no_first_byte(instruments: dict[str, Instrument]) -> None:
    assert (await ask(FakeSynthesizer(script=[Overloaded("full")]))).status_code == 429
    assert instruments["TTFB"].values == instruments["TTFP"].values == []


def test_who_used_how_much_is_for_admins() -> None:
    exported = f'{OURS}# TYPE ray_talkray_usage_codes_total counter\nray_talkray_usage_codes_total{{key="ada"}} 1\n'
    told = []
    for visitor in (EVERYBODY, Visitor("boss", sees_all=True), Visitor("bob"), STRANGER):
        context = contextvars.copy_context()
        context.run(VISITOR.set, visitor)
        told.append(context.run(visible, exported.encode()).decode())
    assert told == [exported, exported, OURS, OURS]


@pytest.mark.parametrize("path", ["/metrics", "/metrics/all"])
async def test_rays_metrics_are_shown_on_request(path: str) -> None:
    answer = await ask(FakeSynthesizer(), path)
    assert (answer.status_code, answer.text) == (200, EXPORTED if path == "/metrics/all" else OURS)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_every_instrument_is_named_with_its_unit() -> None:
    assert metrics.INSTRUMENTS
    for instrument in metrics.INSTRUMENTS:
        assert instrument.name.startswith("talkray_")
        assert not (instrument.boundaries and instrument.name.endswith("_total")), instrument.name


@pytest.mark.parametrize("reason", FinishReason)
async def test_an_ending_is_counted_by_its_reason(instruments: dict[str, Instrument], reason: FinishReason) -> None:
    script = [chunk(b"\0\0"), chunk(b"\0\0", finish_reason=reason)]
    await hear(FakeSynthesizer(script=script))
    assert (instruments["ENDINGS"].values, instruments["ENDINGS"].tags) == ([1], [{"reason": reason, "model": ""}])

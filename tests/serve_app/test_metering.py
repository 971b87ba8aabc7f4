"""What is measured of a stream, with instruments that only remember."""

from collections.abc import Callable

import httpx
import pytest
from ray.util.metrics import Metric

from deployments import metrics
from deployments.errors import Overloaded
from deployments.metrics import StreamMeter
from serve_app.api import create_api
from serve_app.api_settings import ApiSettings
from serve_app.node import Node
from tests.serve_app.fake import FakeSynthesizer, utterance

pytestmark = pytest.mark.anyio

BODY = {"model": "qwen3-tts", "input": "Hello.", "voice": "alloy", "response_format": "pcm"}


class Instrument:
    def __init__(self) -> None:
        self.values: list[float] = []

    def record(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        self.values.append(value)

    observe = inc = set = record


@pytest.fixture
def instruments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Instrument]:
    names = ["TTFB", "TTFP", "LATENESS", "UNDERRUNS", "AUDIO", "RTF", "REFUSALS", "STREAMS"]
    made = {name: Instrument() for name in names}
    for name, instrument in made.items():
        monkeypatch.setattr(metrics, name, instrument)
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time that stream meters see."""

    class Clock:
        now_s = 0.0

        def perf_counter(self) -> float:
            return self.now_s

    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)

    def at(now_s: float) -> None:
        clock.now_s = now_s

    return at


def test_a_player_without_a_buffer(instruments: dict[str, Instrument], clock: Callable[[float], None]) -> None:
    clock(10.0)
    meter = StreamMeter(started_s=9.5)
    meter.deliver(1.0)  # plays until 11.0
    clock(10.5)
    meter.deliver(0.5)  # until 11.5
    clock(12.0)
    meter.deliver(1.0)  # half a second late, until 13.0
    clock(12.9)
    meter.deliver(0.1)
    meter.finish()
    assert instruments["TTFP"].values == [0.5]
    assert instruments["LATENESS"].values == pytest.approx([0.0, 0.0, 0.5, 0.0])
    assert len(instruments["UNDERRUNS"].values) == 1
    assert sum(instruments["AUDIO"].values) == pytest.approx(2.6)
    assert instruments["RTF"].values == pytest.approx([3.4 / 2.6])


def test_a_stream_without_audio_has_no_rtf(instruments: dict[str, Instrument]) -> None:
    StreamMeter().finish()
    assert instruments["RTF"].values == []


async def ask(synthesizer: FakeSynthesizer, path: str = "/v1/audio/speech") -> httpx.Response:
    node = Node(is_running=lambda: True, scrape=lambda: b"talkray_x 1\n")
    transport = httpx.ASGITransport(create_api(synthesizer, ApiSettings(), node=node))
    async with httpx.AsyncClient(transport=transport, base_url="http://talkray") as client:
        return await (client.get(path) if path == "/metrics" else client.post(path, json=BODY))


async def test_one_first_byte_for_each_answer_with_speech(instruments: dict[str, Instrument]) -> None:
    assert (await ask(FakeSynthesizer(script=utterance(3)))).status_code == 200
    assert len(instruments["TTFB"].values) == len(instruments["TTFP"].values) == len(instruments["RTF"].values) == 1
    assert instruments["STREAMS"].values == [1, 0]


async def test_a_refusal_is_no_first_byte(instruments: dict[str, Instrument]) -> None:
    assert (await ask(FakeSynthesizer(script=[Overloaded("full")]))).status_code == 429
    assert instruments["TTFB"].values == instruments["TTFP"].values == []


async def test_the_metrics_of_the_node_are_shown_as_they_are() -> None:
    answer = await ask(FakeSynthesizer(), "/metrics")
    assert (answer.status_code, answer.text) == (200, "talkray_x 1\n")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_every_instrument_is_named_with_its_unit() -> None:
    instruments = [value for value in vars(metrics).values() if isinstance(value, Metric)]
    assert instruments
    for instrument in instruments:
        name, kind = instrument.info["name"], type(instrument).__name__
        assert name.startswith("talkray_")
        assert name.endswith("_total") == (kind == "Counter"), name

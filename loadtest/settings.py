"""Complete settings of one run. Equal settings produce equal requests at equal times."""

import base64
import io
import random
import wave
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from loadtest.arrivals import (
    INSTRUCTION,
    LONG_SEGMENTS,
    Arrivals,
    Phase,
    Profile,
    RequestKind,
    ScheduledRequest,
    SpeechLengths,
    Texts,
    arrival_times,
    interrupt,
    mix,
    plan_requests,
)
from loadtest.dialects import DIALECTS, TALKRAY_WS, RequestForm
from loadtest.metrics import Limits

# Body fields specific to requests of these kinds.
_OF_KIND: Mapping[RequestKind | None, dict[str, object]] = {
    RequestKind.WHOLE: {"stream": False, "response_format": "wav"},
    RequestKind.INSTRUCTED: {"instructions": INSTRUCTION},
}


class Transport(StrEnum):
    """Transport of a request."""

    HTTP = "http"
    WEBSOCKET = "websocket"  # Talkray's protocol: one `speak` message per connection
    LIVE = "live"  # Deepgram Flux: text streams in during playback


_SAMPLE_RATE = 24_000  # of recordings to clone
_TRANSCRIPT = "This recording has words, and they are these."


def noise_url(duration_s: float, *, seed: int) -> str:
    """Return a data URL of a WAV file that contains noise."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, _SAMPLE_RATE, 0, "NONE", ""))
        out.writeframes(random.Random(seed).randbytes(2 * round(duration_s * _SAMPLE_RATE)))
    return f"data:audio/wav;base64,{base64.b64encode(file.getvalue()).decode()}"


@dataclass(frozen=True, slots=True)
class Settings:
    """Target, texts and schedule of the requests in one run."""

    url: str
    phases: tuple[Phase, ...] = ()
    arrivals: Arrivals = Arrivals.POISSON
    seed: int = 0
    transport: Transport = Transport.HTTP
    dialect: str = "talkray"  # request format, one of DIALECTS
    options: Mapping[str, object] = field(default_factory=dict)  # fields added to every body: model, voice, extensions
    headers: Mapping[str, str] = field(default_factory=dict)
    lengths: SpeechLengths | None = None
    texts: Texts = Texts.MIXED
    profile: Profile = Profile.ALIKE
    warmup: int = 0  # requests before the run
    words_per_s: float = 30.0  # at which live text arrives
    interrupted: float = 0.0  # share of live turns that the client interrupts
    recording_s: float = 0.0  # duration of the recording that each request clones; 0: use the voice
    recordings: int = 0  # number of different recordings; 0: a new one for each request
    timeout_s: float = 120.0  # for a complete response
    limits: Limits = field(default_factory=Limits)
    replicas_url: str | None = None  # URL at which Serve or Talkray reports replica counts
    processes: int = 1  # client processes

    @property
    def form(self) -> RequestForm:
        """Request format of the server's dialect."""
        return DIALECTS[TALKRAY_WS if self.transport is Transport.WEBSOCKET else self.dialect]

    @property
    def speech_url(self) -> str:
        """Speech endpoint. `url` may end in /v1, as it does for OpenAI's clients."""
        return self.form.url(self.url, self.options)

    @property
    def live_url(self) -> str:
        base = self.url.rstrip("/").removesuffix("/v1").replace("http", "ws", 1)
        return f"{base}/v2/speak?model=flux-{self.options.get('voice', 'alloy')}-en&encoding=linear16&sample_rate=24000"

    @property
    def duration_s(self) -> float:
        """Duration of the schedule. Responses can take longer."""
        return sum(phase.duration_s for phase in self.phases)

    def body(self, request: ScheduledRequest) -> dict[str, object]:
        """Return the request body for a text.

        Planned lengths need a Talkray extension. `max_new_tokens` includes one step for the end of speech, which does
        not produce a frame.
        """
        segments = LONG_SEGMENTS if request.kind is RequestKind.LONG else 1
        exact = {}
        if request.frames is not None and self.form.has_lengths:
            exact = {"max_new_tokens": request.frames // segments + 1, "ignore_eos": True}
        body = {**self.form.body(request.text, self.options), **exact}
        if self.recording_s:
            number = request.index % self.recordings if self.recordings else request.index
            recording = noise_url(self.recording_s, seed=1_000_000 * self.seed + number)
            body |= {"ref_audio": recording, "ref_text": _TRANSCRIPT}
        return body | _OF_KIND.get(request.kind, {})

    def schedule(self) -> list[ScheduledRequest]:
        """Return the requests in order of their planned times."""
        return self._plan(arrival_times(self.arrivals, self.phases, seed=self.seed), seed=self.seed)

    def warmup_schedule(self) -> list[ScheduledRequest]:
        """Return warm-up requests like those of the run, drawn from a separate seed."""
        return self._plan([0.0] * self.warmup, seed=self.seed + 1)

    def _plan(self, times_s: list[float], *, seed: int) -> list[ScheduledRequest]:
        plan = plan_requests(times_s, seed=seed, lengths=self.lengths, texts=self.texts.choices())
        if self.profile is Profile.MIXED:
            return mix(plan, seed=seed)
        return interrupt(plan, self.interrupted, seed=seed) if self.transport is Transport.LIVE else plan

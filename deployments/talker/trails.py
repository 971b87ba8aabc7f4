"""Where a request's time goes in the engine process, for those who want to know."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from deployments.protocol import FrameChunk, GenerateRequest, SynthesisRequest, reached


@dataclass(slots=True)
class _Trail:
    request: SynthesisRequest
    brings_audio: bool  # the engine decodes the first frame as well
    has_codes: bool = False


class Trails:
    """Marks of requests whose first audio has not left the engine process."""

    def __init__(self) -> None:
        self._trails: dict[int, _Trail] = {}

    @contextmanager
    def begin(self, number: int, request: GenerateRequest) -> Iterator[None]:
        """A request has arrived; inside, it is prepared and queued. One that fails there is forgotten."""
        marked = reached(request.synthesis, "to-engine")
        yield
        if marked.marks:
            self._trails[number] = _Trail(reached(marked, "prompt"), request.gpu_frames > 0)

    def follow(self, chunks: list[tuple[int, FrameChunk]]) -> list[tuple[int, FrameChunk]]:
        """`chunks`, the first audio of each marked request with its marks."""
        return [(number, self._follow(number, chunk)) for number, chunk in chunks] if self._trails else chunks

    def end(self, number: int) -> None:
        """Nobody waits for it any more."""
        self._trails.pop(number, None)

    def _follow(self, number: int, chunk: FrameChunk) -> FrameChunk:
        trail = self._trails.get(number)
        if trail is None:
            return chunk
        if len(chunk.codes) and not trail.has_codes:
            trail.request, trail.has_codes = reached(trail.request, "codes"), True
        if trail.brings_audio and not chunk.pcm and chunk.finish_reason is None:
            return chunk
        self.end(number)
        marked = reached(trail.request, "audio") if trail.brings_audio else trail.request
        return replace(chunk, marks=marked.marks)

"""Encoding of recordings on a GPU, on CUDA streams that run in parallel with the engine's steps.

Launching the encoders' kernels takes the host 18 ms, during which no step can start. With captured graphs, it takes
less than 1 ms, and the engine's steps continue until the prompt is complete.
"""

from functools import partial
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deployments.errors import InvalidRequest
from deployments.gpu.graphs import Graphs
from deployments.protocol import ClonePrompt, Codes, Reference
from deployments.talker.model.speaker_encoder import SpeakerEncoder

if TYPE_CHECKING:
    from deployments.codec.encoder import CodecEncoder

# Lengths to capture, which recordings are padded to. Longer recordings run without a graph, because a graph for 30
# seconds takes up 400 MB more GPU memory. Requests contain at most 30 seconds, before resampling.
_SECONDS = (2, 3, 5, 8, 10, 15, 20)
_MAX_SECONDS = 31


class Encoding:
    """A recording's prompt, computed on the GPU."""

    def __init__(self, speaker: Tensor, codes: Tensor | None) -> None:
        """Wrap results in pinned memory, which copies queued on the current stream will fill."""
        self._speaker, self._codes = speaker, codes
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    @property
    def is_done(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def prompt(self) -> ClonePrompt:
        """Return the prompt. Waits for the GPU."""
        self._done.synchronize()
        return ClonePrompt(self._speaker.numpy().copy(), None if self._codes is None else self._codes.numpy().copy())

    def codes(self) -> Codes:
        """Return the codes. Waits for the GPU."""
        codes = self.prompt().codes
        assert codes is not None, "the recording is cloned by its vector only"
        return codes


class RecordingEncoder:
    """A Base checkpoint's encoders, captured for a few lengths. The codec encoder is None for clones by vector.

    Both encoders run at the same time, so their graphs must not share memory.
    """

    def __init__(self, speaker: SpeakerEncoder, codec: "CodecEncoder | None", device: torch.device) -> None:
        self._speaker, self._codec = speaker, codec
        self._speaker_stream, self._codec_stream = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._speaker_graphs, self._codec_graphs = Graphs(self._speaker_stream), Graphs(self._codec_stream)
        frame, rate = 1 if codec is None else codec.frame_samples, speaker.shape.sample_rate
        *self._sizes, self._longest = (ceil(seconds * rate / frame) * frame for seconds in (*_SECONDS, _MAX_SECONDS))
        self._audio = torch.zeros(self._longest, device=device)
        self._num_samples = torch.tensor(self._sizes[0], device=device)
        self._vectors: dict[int, Tensor] = {}  # output of the graph, by size
        self._codes: dict[int, Tensor] = {}

    def capture(self) -> None:
        """Capture all lengths, longest first, because an encoder's graphs share memory."""
        for size in reversed(self._sizes):
            audio = self._audio[:size]
            self._vectors[size] = self._speaker_graphs.capture(
                size, partial(self._speaker.vector, audio, self._num_samples)
            )
            if self._codec is not None:
                self._codes[size] = self._codec_graphs.capture(
                    size, partial(self._codec.codes, audio, self._num_samples)
                )

    @torch.inference_mode()
    def start(self, reference: Reference) -> Encoding:
        """Queue the samples for encoding, without waiting. Raises InvalidRequest if there are too few or too many."""
        num_samples = len(reference.samples)
        self._speaker.check(num_samples)
        size = next((size for size in (*self._sizes, self._longest) if size >= num_samples), None)
        if size is None:
            raise InvalidRequest(f"ref_audio is too long: send at most {_MAX_SECONDS - 1} seconds", "ref_audio")
        try:
            return self._start(reference, size)
        except torch.OutOfMemoryError:
            text = "the GPU has too little free memory to encode ref_audio: send at most {} seconds"
            raise InvalidRequest(text.format(_SECONDS[-1]), "ref_audio") from None

    def _start(self, reference: Reference, size: int) -> Encoding:
        samples = reference.samples
        staged = torch.zeros(size, pin_memory=True)
        staged.numpy()[: len(samples)] = samples
        with torch.cuda.stream(self._codec_stream):
            self._audio[:size].copy_(staged, non_blocking=True)
            self._num_samples.fill_(len(samples))
        self._speaker_stream.wait_stream(self._codec_stream)
        with torch.cuda.stream(self._speaker_stream):
            speaker = self._vector(size).to("cpu", non_blocking=True)
        with torch.cuda.stream(self._codec_stream):
            codes = None
            if self._codec is not None and not reference.x_vector_only:
                num_frames = ceil(len(samples) / self._codec.frame_samples)
                codes = self._coded(self._codec, size)[:num_frames].to("cpu", non_blocking=True)
            self._codec_stream.wait_stream(self._speaker_stream)
            return Encoding(speaker, codes)

    def _vector(self, size: int) -> Tensor:
        if size not in self._vectors:
            return self._speaker.vector(self._audio[:size], self._num_samples)
        self._speaker_graphs.replay(size)
        return self._vectors[size]

    def _coded(self, codec: "CodecEncoder", size: int) -> Tensor:
        if size not in self._codes:
            return codec.codes(self._audio[:size], self._num_samples)
        self._codec_graphs.replay(size)
        return self._codes[size]

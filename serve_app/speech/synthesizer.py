"""The interface between the HTTP surface and the part that makes audio.

A request passes a chain of objects with this interface: `Models` finds its model, `Admission` bounds the load, and
`HandleSynthesizer` of the ingress calls the replicas. `Admission` holds a `LongText`, which cuts a long text into
segments between the two. Tests put a fake in place of `HandleSynthesizer`.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from deployments.protocol import ModelInfo, PcmChunk, SynthesisRequest


class Synthesizer(Protocol):
    """Speaks with a loaded checkpoint."""

    async def describe(self) -> ModelInfo:
        """The loaded checkpoint. Raises NotReady while the replicas are loading."""
        ...

    def synthesize(self, request: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """The audio of one utterance, as it comes. Closing the generator cancels all calls that it has made.

        `info` is what `describe` tells of the request's model. Raises InvalidRequest, Overloaded, NotReady, ReplicaLost
        or EngineError from any step.
        """
        ...

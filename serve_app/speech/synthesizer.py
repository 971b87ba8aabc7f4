"""The interface between the ingress and its calls to the replicas.

An `Utterance` passes `SpeechModel.speak`, which bounds the load and waits for the first audio. `UtteranceSynthesizer`
makes a `SynthesisRequest` of each segment of its text. A `Synthesizer` has the replicas speak those:
`ReplicaSynthesizer` of the ingress, and a fake in tests.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from deployments.protocol import ModelInfo, PcmChunk, SynthesisRequest


class Synthesizer(Protocol):
    """Speaks with a loaded checkpoint. Its classes know Ray, which the folders that use it do not."""

    async def describe(self) -> ModelInfo:
        """The loaded checkpoint. Raises NotReady while the replicas are loading."""
        ...

    def synthesize(self, request: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """The audio of one segment, as it comes. Closing the generator cancels all calls that it has made.

        `info` is the result of `describe` for the request's model. Raises InvalidRequest, Overloaded, NotReady,
        ReplicaLost or EngineError from any step.
        """
        ...

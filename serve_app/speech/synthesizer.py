"""The interface between the ingress and its calls to the replicas.

`SpeechModel.speak` takes an `Utterance`, limits the load and waits for the first audio. `UtteranceSynthesizer` makes a
`SynthesisRequest` for each segment of its text. A `Synthesizer` sends these to the replicas: `ReplicaSynthesizer` in
the ingress, a fake in tests.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from deployments.protocol import ModelInfo, PcmChunk, SynthesisRequest


class Synthesizer(Protocol):
    """Speaks with a loaded checkpoint. Implementations may depend on Ray; the folders that use them do not."""

    async def describe(self) -> ModelInfo:
        """The loaded checkpoint. Raises NotReady while the replicas are loading."""
        ...

    def synthesize(self, request: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """The audio of one segment, as it is made. Closing the generator cancels all of its calls.

        `info` is the result of `describe` for the request's model. Raises InvalidRequest, Overloaded, NotReady,
        ReplicaLost or EngineError from any step.
        """
        ...

"""Interface between the ingress and the replicas.

`SpeechModel.speak` takes an `Utterance`, limits the load and waits for the first audio. `UtteranceSynthesizer` makes a
`SynthesisRequest` for each segment of the text. A `Synthesizer` sends the requests to replicas. The ingress uses
`ReplicaSynthesizer`, and tests use a fake.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from deployments.protocol import ModelInfo, PcmChunk, SynthesisRequest


class Synthesizer(Protocol):
    """Synthesizer for a loaded checkpoint. Implementations may depend on Ray; the folders that use the interface do
    not.
    """

    async def describe(self) -> ModelInfo:
        """Describe the loaded checkpoint. Raises NotReady while the replicas are loading."""
        ...

    def synthesize(self, request: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """Yield the audio of one segment as it is generated. Closing the generator cancels all of its calls.

        `info` is the result of `describe` for the request's model. Raises InvalidRequest, Overloaded, NotReady,
        ReplicaLost or EngineError at any point.
        """
        ...

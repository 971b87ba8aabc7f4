"""Calls to a model's replicas through Ray Serve handles, from the ingress and from jobs."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial

from pydantic import TypeAdapter
from ray.serve.handle import DeploymentHandle

from deployments.config import TalkerConfig
from deployments.errors import CheckpointError, CodecLost, NotReady, TalkerLost
from deployments.protocol import FrameChunk, ModelInfo, PcmChunk, SynthesisRequest
from deployments.serving import ray_private
from deployments.serving.failover import with_failover
from deployments.serving.handles import call_replica, stream_from_replica
from deployments.serving.replica_streams import CodecAudio, TalkerAudio
from deployments.weights.description import describe
from serve_app.audio.clone_prompts import store_clone_prompt, with_prompt
from serve_app.config import AdmissionSettings

logger = logging.getLogger(__name__)

# A handle call waits indefinitely for a replica. A request waits at most _DESCRIBE_TIMEOUT_S for the model's
# description. The shared call is repeated after _ASK_TIMEOUT_S, because its replica may hang.
_DESCRIBE_TIMEOUT_S, _ASK_TIMEOUT_S = 2.0, 10.0


@dataclass(frozen=True, slots=True)
class Deployed:
    """Model and its deployments, as bound by `build_app`."""

    name: str  # empty if there is only one
    checkpoint: str
    config: TalkerConfig
    on_gpu: bool
    admission: AdmissionSettings
    deployments: tuple[str, str]  # names of the model's talker and codec deployments
    codec: DeploymentHandle
    # Talkers that also decode audio (placement `inline`), or None. The ingress calls these talkers directly. If they
    # run on a CPU, the codec pool only encodes recordings for cloning.
    inline_talker: DeploymentHandle | None = None

    def known_info(self) -> ModelInfo | None:
        """Return the description of one of several models, from its files or from another ingress's note. A call to the
        talkers might start them. Return None for a single model, whose description comes from its talkers.
        """
        if not self.name:
            return None
        try:
            info = describe(self.checkpoint, self.config, on_gpu=self.on_gpu)
        except CheckpointError as error:  # this model's talkers cannot start, but those of other models can
            logger.error("the model %s: %s", self.name, error)
            return None
        if info is not None:
            return self._named(info)
        note = ray_private.get_note(self._note_key)
        return None if note is None else TypeAdapter(ModelInfo).validate_json(note)

    def remember(self, info: ModelInfo) -> ModelInfo:
        """Store a talker's description for other ingresses."""
        info = self._named(info)
        ray_private.put_note(self._note_key, TypeAdapter(ModelInfo).dump_json(info))
        return info

    def _named(self, info: ModelInfo) -> ModelInfo:
        return replace(info, name=self.name, checkpoint=self.checkpoint)

    @property
    def _note_key(self) -> str:
        return f"description of {self.name}: {self.checkpoint}"


class ReplicaSynthesizer:
    """Synthesizer that calls a model's codec pool, which calls the talkers. If the talkers also decode, it calls the
    talkers.
    """

    def __init__(self, served: Deployed) -> None:
        self._served = served
        self._info = served.known_info()
        self._describe_task: asyncio.Task[ModelInfo] | None = None

    async def describe(self) -> ModelInfo:
        """Describe the loaded checkpoint. All requests share one call. Raises NotReady while the pools are loading."""
        if self._info is not None:
            return self._info
        if self._describe_task is None or self._describe_task.done():
            # In a request's context, Serve would cancel the call if that request's client disconnected.
            self._describe_task = asyncio.create_task(self._remember(), context=Context())
            self._describe_task.add_done_callback(self._log_failure)
        # If there are several models, a request does not wait, because another model may be able to serve it.
        wait_s = 0.0 if self._served.name else _DESCRIBE_TIMEOUT_S
        try:
            return await asyncio.wait_for(asyncio.shield(self._describe_task), wait_s)
        except TimeoutError:
            raise NotReady("the model is still loading") from None

    async def _remember(self) -> ModelInfo:
        """Request the description and store it. With several models, this starts a pool that is scaled to zero."""
        if self._served.name:
            self._info = self._served.remember(await self._call_describe())
        else:
            self._info = await asyncio.wait_for(self._call_describe(), _ASK_TIMEOUT_S)
        return self._info

    def _log_failure(self, asking: asyncio.Task[ModelInfo]) -> None:
        if not asking.cancelled() and (error := asking.exception()) is not None:
            logger.info("the model %s cannot be described yet: %r", self._served.name, error)

    async def _call_describe(self) -> ModelInfo:
        """Call `TalkerReplica.describe` or `CodecReplica.describe`. Waits indefinitely for a talker."""
        info: ModelInfo
        if self._served.inline_talker is not None:
            info = await call_replica(self._served.inline_talker, "describe", lost=TalkerLost)
        else:
            info = await call_replica(self._served.codec, "describe", self._served.name, lost=CodecLost)
        return info

    def synthesize(self, request: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """Yield the audio of one segment. Closing the generator cancels all its calls and frees the KV blocks.

        If a replica is lost, another replica continues at the next sample.
        """
        if request.reference is not None:
            request = replace(request, reference=with_prompt(request.reference))
        keep = partial(_keep_clone_prompt, request)
        if self._needs_codec_pool(request, info):
            return with_failover(CodecAudio(request, self._call_codec, info, each_chunk=keep))
        return with_failover(TalkerAudio(request, self._call_talker, info, each_chunk=keep))

    def _needs_codec_pool(self, request: SynthesisRequest, info: ModelInfo) -> bool:
        """Return whether the codec pool decodes the audio, or must encode a recording for talkers on a CPU."""
        reference = request.reference
        has_codes = reference is None or reference.x_vector_only or reference.prompt is not None
        return self._served.inline_talker is None or not (has_codes or info.talker_on_gpu)

    def _call_codec(self, request: SynthesisRequest) -> AsyncGenerator[PcmChunk, None]:
        """Call `CodecReplica.synthesize`."""
        return stream_from_replica(self._served.codec, "synthesize", request, lost=CodecLost)

    def _call_talker(self, request: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
        """Call `TalkerReplica.generate`."""
        assert self._served.inline_talker is not None
        return stream_from_replica(self._served.inline_talker, "generate", request, lost=TalkerLost)


def _keep_clone_prompt(request: SynthesisRequest, chunk: PcmChunk) -> None:
    """Store the prompt that a replica made from the request's recording, for later requests."""
    if request.reference is not None and chunk.clone_prompt is not None:
        store_clone_prompt(request.reference, chunk.clone_prompt)

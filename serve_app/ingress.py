"""The ingress deployment: the HTTP and WebSocket surface on top of a codec handle."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import numpy as np
from fastapi import FastAPI
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle

from deployments.errors import CodecLost, NotReady, TalkerLost
from deployments.failover import persist
from deployments.forward import forward
from deployments.handles import call, stream
from deployments.protocol import Codes, ModelInfo, PcmChunk, Resume, SynthesisRequest, reached
from serve_app.api import create_api
from serve_app.api_settings import ApiSettings
from serve_app.exposure import for_host
from serve_app.node import Node
from serve_app.pool_watch import PoolWatch, scrape

# A handle call waits for a replica however long that takes; a client that asks whether we are ready does not.
_DESCRIBE_TIMEOUT_S = 2.0


class HandleSynthesizer:
    """Synthesis by the codec pool, which in turn asks the talker pool; or by the talker pool, whose GPU decodes too."""

    def __init__(self, codec: DeploymentHandle, *, talker: DeploymentHandle | None = None) -> None:
        """With a `talker`, only what needs a codec encoder goes through the codec pool."""
        self._codec, self._talker = codec, talker
        self._info: ModelInfo | None = None

    async def describe(self) -> ModelInfo:
        """The loaded checkpoint, asked once; raises NotReady while the pools load."""
        if self._info is not None:
            return self._info
        try:
            info: ModelInfo = await asyncio.wait_for(call(self._codec, "describe", lost=CodecLost), _DESCRIBE_TIMEOUT_S)
        except TimeoutError:
            raise NotReady("the model is still loading") from None
        self._info = info
        return info

    async def synthesize(self, request: SynthesisRequest) -> AsyncGenerator[PcmChunk, None]:
        """Audio of one utterance; leaving the generator frees everything behind it, down to the talker's KV blocks.

        A replica that is lost is followed by another one, which goes on at the very next sample.
        """
        async with aclosing(await self._begin(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _begin(self, request: SynthesisRequest) -> AsyncGenerator[PcmChunk, None]:
        talker, reference = self._talker, request.reference
        if talker is None or (reference is not None and not reference.x_vector_only):
            return self._from_codec(request)
        return forward(request, lambda asked: stream(talker, "generate", asked, lost=TalkerLost), await self.describe())

    async def _from_codec(self, request: SynthesisRequest) -> AsyncGenerator[PcmChunk, None]:
        codes: list[Codes] = []
        position = 0

        def ask() -> AsyncGenerator[PcmChunk, None]:
            resume = Resume(np.concatenate(codes), position) if codes else None
            return stream(self._codec, "synthesize", replace(request, resume=resume), lost=CodecLost)

        async with aclosing(persist(ask, request_id=request.request_id, lost=CodecLost)) as chunks:
            async for chunk in chunks:
                if len(chunk.codes):
                    codes.append(chunk.codes)
                elif not chunk.pcm and chunk.finish_reason is None:
                    continue  # a sign of life
                position = chunk.position
                yield reached(chunk, "from-codec")


class Ingress:
    """One replica of the HTTP surface. Imports no torch. Raises StartError where anybody could use it without a key."""

    def __init__(self, settings: ApiSettings, codec: DeploymentHandle, talker: DeploymentHandle | None = None) -> None:
        """`talker` as in HandleSynthesizer."""
        settings = for_host(settings, _bind_host())
        watch = PoolWatch(serve.get_replica_context().app_name)
        node = Node(is_running=watch.has_talker, scrape=scrape)
        self._api = create_api(HandleSynthesizer(codec, talker=talker), settings, echo_request_id=False, node=node)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._api


def _bind_host() -> str | None:
    """Where Serve's proxies listen. Ray has no public way to ask."""
    host: str | None = _get_global_client().http_config.host
    return host

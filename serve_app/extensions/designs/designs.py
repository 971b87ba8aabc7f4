"""Voices from descriptions: what a model spoke is a candidate, and a candidate that is locked is a stored voice.

Candidates lie in the store for an hour, with their owner, so that any replica can lock one. An owner has MOST_KEPT of
them; the oldest goes first.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from deployments.errors import NotFound
from serve_app.audio.recordings import MIN_SECONDS
from serve_app.extensions.voices.library import Voices
from serve_app.extensions.voices.stored_voice import (
    MAX_DESCRIPTION,
    NEUTRAL,
    Details,
    SentRecording,
    StoredDesign,
    StoredVoice,
    Take,
    new_id,
    now,
)
from serve_app.visitor import VISITOR

MOST_KEPT = 30  # of each owner: 45 MB, as none is longer than LONGEST_S
LONGEST_S, SHORTEST_S = 28.0, MIN_SECONDS  # of a candidate: it is a recording to clone
_NO_PERSON = "none needed: made from a description, no person was recorded"


@dataclass(frozen=True, slots=True)
class DesignedSpeech:
    """What a model said with a voice of its own making."""

    pcm: bytes  # s16le, mono
    sample_rate: int
    text: str
    seed: int

    @property
    def seconds(self) -> float:
        return len(self.pcm) / 2 / self.sample_rate


@dataclass(frozen=True, slots=True)
class Description:
    """What was asked for, and of which model."""

    words: str
    model: str
    language: str | None = None


async def keep(voices: Voices, spoken: Sequence[DesignedSpeech], description: Description) -> list[StoredDesign]:
    """The candidates as VISITOR's. Raises StoreFailed."""
    owner = VISITOR.get().name or ""
    own = [each for each in await voices.all_of(StoredDesign) if each.owner == owner]
    for each in own[: max(0, len(own) + len(spoken) - MOST_KEPT)]:
        await voices.remove(each)
    kept = []
    for speech in spoken:
        samples = np.frombuffer(speech.pcm, "<i2")
        take_fields = {"style": NEUTRAL, "text": speech.text}
        take, flac = await asyncio.to_thread(Take.of_samples, samples, speech.sample_rate, "PCM_16", **take_fields)
        design = StoredDesign(
            id=new_id("design"),
            owner=owner,
            created_at=now(),
            description=description.words[:MAX_DESCRIPTION],
            language=description.language,
            model=description.model,
            seed=speech.seed,
            take=take,
        )
        await voices.keep(design, {take.sha256: flac})
        kept.append(design)
    return kept


async def find(voices: Voices, design_id: str, *, field: str = "design") -> StoredDesign:
    """The candidate that VISITOR means; `field` is the client's name for its id. Raises NotFound."""
    designs = await voices.all_of(StoredDesign)
    matches = [each for each in designs if each.id == design_id.lower() and each.expires_at > now()]
    if not matches:
        why = "it was made more than an hour ago, others took its place, or it is not yours"
        raise NotFound(f"{field}: no design {design_id[:80]!r} is kept: {why}.", field, "design_not_found")
    return matches[0]


async def lock(voices: Voices, design_id: str, details: Details, *, field: str = "design") -> StoredVoice:
    """Store a candidate's audio and text as a voice; what `details` leave out is the candidate's.

    The audio is the truth, as of every voice: Base reads it, as the official package reads a design that it is to
    repeat. The codes that it was made of are not kept: they would lack what the preparation of a recording does.

    Raises NotFound, InvalidRequest, Conflict.
    """
    design = await find(voices, design_id, field=field)
    details = replace(
        details,
        language=details.language or design.language,
        description=details.description or design.description,
        consent=details.consent or _NO_PERSON,
        provenance=f"design: {design.model}, seed {design.seed}",
    )
    flac = await voices.recording(design, design.take)
    return await voices.add(details, [SentRecording(flac, design.take.text)], field=field)

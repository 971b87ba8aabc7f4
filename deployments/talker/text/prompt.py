"""Conversion of a request to the rows of the talker's prefill.

A row is the sum of a text track and a codec track. In streaming-text mode, the rows end with the first text token, and
each later frame adds one token from the *trailing text*. In full-text mode, the prompt contains all text. Source:
`generate` of the official package; golden codes verify the result. Both tracks are indices into `InputTables`.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deployments.errors import InvalidRequest
from deployments.protocol import ClonePrompt, Codes, ModelKind, Reference, SynthesisRequest
from deployments.recording_cache import RecordingCache
from deployments.talker.model.input_tables import Ids, InputTables
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.text.tokenizer import TextTokenizer

if TYPE_CHECKING:  # only models that clone voices have encoders
    from deployments.talker.model.speaker_encoder import SpeakerEncoder
    from deployments.talker.runner.recording_encoder import Encoding, RecordingEncoder

_SPEAKER_BYTES = 8 << 20  # cache for a thousand speaker vectors
_CODES_BYTES = 8 << 20  # cache for the codes of a thousand 24-second recordings


@dataclass(frozen=True, slots=True)
class Prompt:
    """Positions to prefill, and text tokens to be added to later frames, as indices into the tables."""

    text_ids: Ids  # [positions]
    codec_ids: Ids  # [positions]; ids from `InputTables.first_dense` on are numbers of rows in `dense`
    trailing: Ids  # [frames]: text ids; all further frames get padding
    num_text_tokens: int
    dense: Tensor | None = None  # [n, hidden]
    has_all_text: bool = True  # False while the client is still writing the text
    text_start: int = 0  # position of the first token of the request's text; the other tokens follow it

    @property
    def num_positions(self) -> int:
        return len(self.text_ids)

    @property
    def num_text_positions(self) -> int:
        """Number of text tokens plus the end token. All text has been spoken once the talker has read the end token."""
        return self.num_text_tokens + 1


@dataclass(frozen=True, slots=True)
class _Track:
    """Consecutive codec rows: indices, and the dense rows among them in order."""

    ids: list[int]
    dense: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class _Speaker:
    vector: Tensor  # [hidden], with the text table's dtype and device
    on_host: Tensor  # [hidden], float32


class PromptBuilder:
    """Builds prompts for one loaded checkpoint."""

    def __init__(
        self,
        tables: InputTables,
        tokenizer: TextTokenizer,
        speaker_encoder: "SpeakerEncoder | None" = None,
        recordings: "RecordingEncoder | None" = None,
        *,
        follows_instructions: bool = True,
    ) -> None:
        """Create a builder. On a GPU, `recordings` runs the encoders. On a CPU, codec replicas send the codes."""
        self._follows_instructions = follows_instructions
        self.tables = tables
        self.talker = tables.talker
        self.config: ModelConfig = self.talker.config
        self.tokenizer = tokenizer
        self.speaker_encoder, self.recordings = speaker_encoder, recordings
        self.speakers: RecordingCache[_Speaker] = RecordingCache(
            max_bytes=_SPEAKER_BYTES, size=lambda speaker: speaker.vector.nbytes
        )
        self.references: RecordingCache[Codes] = RecordingCache(max_bytes=_CODES_BYTES)

    def start_encoding(self, request: SynthesisRequest) -> "Encoding | None":
        """Start encoding a request's recording on a GPU. Returns None if there is nothing to encode.

        Raises InvalidRequest if the recording is too short or too long.
        """
        reference = request.reference
        if self.recordings is None or reference is None or reference.prompt is not None:
            return None
        needs_codes = not reference.x_vector_only and request.reference_codes is None
        has_codes = not needs_codes or self.references.find(reference.key) is not None
        if has_codes and self.speakers.find(reference.key) is not None:
            return None
        return self.recordings.start(reference)

    def encoded(self, request: SynthesisRequest, encoding: "Encoding") -> SynthesisRequest:
        """Return `request` with the result of `encoding`, and store the result for later requests."""
        reference, prompt = request.reference, encoding.prompt()
        assert reference is not None, "only recordings are encoded"
        codes = prompt.codes
        self.speakers.get(reference.key, lambda: self._speaker_of(prompt))
        if codes is not None:
            self.references.get(reference.key, lambda: codes)
        return replace(request, reference=replace(reference, prompt=prompt))

    def with_codes(self, request: SynthesisRequest) -> SynthesisRequest:
        """Return `request` with its recording's codes if it clones in context. Raises InvalidRequest."""
        reference, recordings = request.reference, self.recordings
        if reference is None or reference.x_vector_only or request.reference_codes is not None:
            return request
        if reference.prompt is not None:
            assert reference.prompt.codes is not None, "the ingress sends samples if codes are missing"
            return replace(request, reference_codes=reference.prompt.codes.copy())  # torch requires writable arrays
        if recordings is None:
            return request
        codes = self.references.get(reference.key, lambda: recordings.start(reference).codes())
        return replace(request, reference_codes=codes)

    def clone_prompt(self, request: SynthesisRequest) -> ClonePrompt | None:
        """Return the clone prompt for a recording that arrived as samples; None before the prompt has been built."""
        reference = request.reference
        if reference is None or reference.audio is None:
            return None
        speaker = self.speakers.find(reference.key)
        codes = None if reference.x_vector_only else request.reference_codes
        return None if speaker is None else ClonePrompt(speaker.on_host.numpy(), codes)

    def build(self, request: SynthesisRequest) -> Prompt:
        """Build the prompt for a request whose text is complete. Raises InvalidRequest if the text is empty."""
        body, _ = self.tokenizer.encode_body(request.text, gap=request.gap)
        return self.build_from_ids(request, body, has_all_text=True)

    def texts(self, request: SynthesisRequest) -> list[str]:
        """Return all of a request's texts, exactly as passed to the tokenizer."""
        reference = request.reference
        spoken = "" if reference is None or reference.x_vector_only else reference.text or ""
        others = (spoken, request.instructions or "", "" if request.tail is None else request.tail.text.rstrip())
        return [request.gap + request.text.lstrip(), *(each.lstrip() for each in (*others, *request.following))]

    def least_tokens(self, request: SynthesisRequest) -> int:
        """Return the number of tokens that a prefill of unfinished text needs: one more than the number of frames."""
        codes = request.before
        beside = 0 if codes is None else 1 + max(0, len(codes) - len(self._text_before(request)))
        return beside + (0 if request.prefix is None else len(request.prefix)) + 1

    def extend(self, prompt: Prompt, more: list[int], *, has_all_text: bool) -> Prompt:
        """Return `prompt` with further tokens from a text that the client is still writing."""
        trailing = [*more, self.config.tokens.tts_eos] if has_all_text else more
        new = np.array(trailing, dtype=np.int32)
        self.tables.project(new)
        return replace(
            prompt,
            trailing=np.concatenate((prompt.trailing, new)),
            num_text_tokens=prompt.num_text_tokens + len(more),
            has_all_text=has_all_text,
        )

    @torch.inference_mode()
    def build_from_ids(self, request: SynthesisRequest, body: list[int], *, has_all_text: bool) -> Prompt:
        """Build the prompt for a request. `body` holds all of its text's tokens, or at least `least_tokens` of them."""
        tokens, codes = self.config.tokens, self.config.codes
        if not body:
            raise InvalidRequest("input has no text to speak", "input", "empty_input")
        text, codec, dense = self._head(request)
        trailing = [tokens.tts_pad]
        ending = [tokens.tts_eos] if has_all_text else []
        text_start = len(text)
        if (before := request.before) is not None:
            frames = _Track(self._dense(len(before)), (self._frames(before),))
            text_before = self._text_before(request)
            text_start += len(text_before)
            text_rows, codec_rows, trailing = self._going_on(request, [*text_before, *body, *ending], frames)
            dense = (*dense, *frames.dense)
        elif full_text(self.config.kind, request):
            text_rows = [*body, *ending, tokens.tts_pad]
            codec_rows = [codes.pad] * (len(body) + 1) + [codes.bos]
        else:
            text_rows, codec_rows, trailing = body[:1], [codes.bos], [*body[1:], *ending]
        prompt = self._prompt((text + text_rows, codec + codec_rows, trailing), dense, num_text_tokens=len(body))
        return replace(prompt, has_all_text=has_all_text, text_start=text_start)

    def _prompt(
        self, ids: tuple[list[int], list[int], list[int]], dense: tuple[Tensor, ...], *, num_text_tokens: int
    ) -> Prompt:
        text, codec, trailing = (np.array(each, dtype=np.int32) for each in ids)
        is_dense = codec >= self.tables.first_dense
        codec[is_dense] = self.tables.first_dense + np.arange(is_dense.sum())
        self.tables.project(np.concatenate((text, trailing)))
        return Prompt(text, codec, trailing, num_text_tokens, torch.cat(dense) if dense else None)

    def _head(self, request: SynthesisRequest) -> tuple[list[int], list[int], tuple[Tensor, ...]]:
        """Return text ids, codec ids and dense rows for instructions, role, codec tags and speaker."""
        tokens, lead = self.config.tokens, list(self.tokenizer.role)
        if request.instructions and self._follows_instructions:
            lead = self.tokenizer.encode_instructions(request.instructions) + lead
        tags = self._codec_tags(request)
        text = [*lead, *[tokens.tts_pad] * (len(tags.ids) - 1), tokens.tts_bos]
        return text, [self.tables.no_code] * len(lead) + tags.ids, tags.dense

    def _codec_tags(self, request: SynthesisRequest) -> _Track:
        """Return the codec rows before the beginning of speech."""
        codes = self.config.codes
        language = self._language(request)
        if language is None:
            tags = [codes.nothink, codes.think_bos, codes.think_eos]
        else:
            tags = [codes.think, codes.think_bos, language, codes.think_eos]
        speaker = self._speaker(request)
        return _Track([*tags, *speaker.ids, codes.pad], speaker.dense)

    def _language(self, request: SynthesisRequest) -> int | None:
        """Return the language id; None for automatic. Dialect speakers use their dialect for automatic or Chinese."""
        dialect = self.config.dialects.get(request.voice or "")
        if dialect and request.language in ("auto", "chinese"):
            return self.config.languages[dialect]
        return None if request.language == "auto" else self.config.languages[request.language]

    def _speaker(self, request: SynthesisRequest) -> _Track:
        """Return the row for a built-in speaker or the reference's x-vector; empty for described voices."""
        if request.reference is not None:
            assert self.speaker_encoder is not None, "the ingress sends references only to base checkpoints"
            row = self._speaker_vector(self.speaker_encoder, request.reference)
            return _Track(self._dense(1), (row[None],))
        if self.config.kind is ModelKind.CUSTOM_VOICE:
            assert request.voice is not None, "the ingress sets a speaker"
            return _Track([self.config.speakers[request.voice]])
        return _Track([])

    def _speaker_vector(self, encoder: "SpeakerEncoder", reference: Reference) -> Tensor:
        """Return the speaker's row [hidden] with the text table's dtype and device."""

        def embed() -> _Speaker:
            if self.recordings is not None:
                return self._speaker_of(self.recordings.start(reference).prompt())
            return self._speaker_of(ClonePrompt(encoder.embed(torch.from_numpy(reference.samples.copy())).numpy()))

        if reference.prompt is None:
            return self.speakers.get(reference.key, embed).vector
        speaker = self.speakers.find(reference.key)
        if speaker is None:
            speaker = self._speaker_of(reference.prompt)
            self.speakers.put(reference.key, speaker)
        return speaker.vector

    def _speaker_of(self, prompt: ClonePrompt) -> _Speaker:
        """Copy a speaker vector to the device, only once per recording, because a copy waits for the device."""
        on_host = torch.from_numpy(prompt.speaker.copy())
        return _Speaker(on_host.to(self.tables.text), on_host)

    def _going_on(
        self, request: SynthesisRequest, text: list[int], frames: _Track
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the rows for speech that continues from `frames`, with text and frames in parallel or in sequence.

        `text` begins with the text that the frames speak. A complete text ends with the end token.
        """
        codes, pad = self.config.codes, self.config.tokens.tts_pad
        codec = [codes.bos, *frames.ids]
        if full_text(self.config.kind, request):
            return text + [pad] * len(codec), [codes.pad] * len(text) + codec, [pad]
        if len(text) > len(codec):
            return text[: len(codec)], codec, text[len(codec) :]
        return text + [pad] * (len(codec) - len(text)), codec, [pad]

    def _text_before(self, request: SynthesisRequest) -> list[int]:
        """Return the tokens spoken in the frames of `SynthesisRequest.before`."""
        reference = "" if request.reference_codes is None or request.reference is None else request.reference.text
        tail = "" if request.tail is None else request.tail.text.rstrip()
        return self.tokenizer.encode(reference or "") + self.tokenizer.encode(tail)

    def _frames(self, codes: Codes) -> Tensor:
        return self.talker.embed_frames(torch.from_numpy(codes).long().to(self.tables.device))

    def _dense(self, count: int) -> list[int]:
        """Return placeholders for rows that are not in the tables, which `_prompt` numbers."""
        return [self.tables.first_dense] * count


def full_text(kind: ModelKind, request: SynthesisRequest) -> bool:
    """Return whether the prompt contains all text. By default, only clones stream their text.

    Text that the client is still writing is always streamed.
    """
    if request.mailbox is not None:
        return False
    if request.non_streaming_mode is not None:
        return request.non_streaming_mode
    return kind is not ModelKind.BASE

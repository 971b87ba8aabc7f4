"""From a request to the rows the talker is prefilled with.

A row is the sum of a text track and a codec track. In streaming-text mode the rows end with the first text token and
the rest of the text *trails*, one token a frame; in full-text mode all text stands in the prompt. Source: `generate` of
the official package; golden codes pin it down.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.errors import InvalidRequest
from deployments.protocol import GenerateRequest, ModelKind, SynthesisRequest
from deployments.talker.model.config import ModelConfig
from deployments.talker.model.speaker_encoder import SpeakerEncoder
from deployments.talker.model.talker import Talker
from deployments.talker.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """Rows to prefill, and the text rows that are added to the frames that follow."""

    rows: Tensor  # [rows, hidden]
    trailing: Tensor  # [frames, hidden]; beyond them every frame gets `pad`
    pad: Tensor  # [hidden]
    num_text_tokens: int

    def text_row(self, frame: int) -> Tensor:
        """[hidden]: the text that goes into the talker together with frame number `frame`."""
        return self.trailing[frame] if frame < len(self.trailing) else self.pad


class PromptBuilder:
    """Builds prompts for one loaded checkpoint."""

    def __init__(self, talker: Talker, tokenizer: TextTokenizer, speaker_encoder: SpeakerEncoder | None) -> None:
        self.config: ModelConfig = talker.config
        self.talker = talker
        self.tokenizer = tokenizer
        self.speaker_encoder = speaker_encoder
        tokens = self.config.tokens
        specials = talker.embed_text([tokens.tts_bos, tokens.tts_eos, tokens.tts_pad])
        self.bos, self.eos, self.pad = specials[0:1], specials[1:2], specials[2:3]

    @torch.inference_mode()
    def build(self, request: GenerateRequest) -> Prompt:
        """The prompt of a request; raises InvalidRequest where its text holds nothing to say."""
        synthesis = request.synthesis
        body = self.tokenizer.encode(synthesis.text)
        if not body:
            raise InvalidRequest("input has no text to speak", "input", "empty_input")
        head, codec_tail = self._head(synthesis)
        if request.reference_codes is not None:
            rows, trailing = self._clone_rows(request, body)
        elif full_text(self.config.kind, synthesis):
            rows, trailing = self._full_text_rows(body), self.pad
        else:
            rows = self.talker.embed_text(body[:1]) + codec_tail
            trailing = torch.cat((self._text(body[1:]), self.eos))
        return Prompt(torch.cat((head, rows)), trailing, self.pad[0], len(body))

    def _head(self, request: SynthesisRequest) -> tuple[Tensor, Tensor]:
        """Instructions, role, codec tags with the speaker: rows [n, hidden]; and the last codec row [1, hidden]."""
        codec = self._codec_tags(request)
        text = torch.cat((self.pad.expand(len(codec) - 2, -1), self.bos))
        rows = [self.talker.embed_text(self.tokenizer.role), text + codec[:-1]]
        if request.instructions and not self.config.drops_instructions:
            rows.insert(0, self.talker.embed_text(self.tokenizer.encode_instructions(request.instructions)))
        return torch.cat(rows), codec[-1:]

    def _codec_tags(self, request: SynthesisRequest) -> Tensor:
        codes = self.config.codes
        language = self._language(request)
        if language is None:
            tags = [codes.nothink, codes.think_bos, codes.think_eos]
        else:
            tags = [codes.think, codes.think_bos, language, codes.think_eos]
        speaker = self._speaker_row(request)
        middle = [] if speaker is None else [speaker]
        return torch.cat((self.talker.embed_codes(tags), *middle, self.talker.embed_codes([codes.pad, codes.bos])))

    def _language(self, request: SynthesisRequest) -> int | None:
        """The language's id, None for automatic. Dialect speakers keep to it unless another language is asked for."""
        dialect = self.config.dialects.get(request.voice or "")
        if dialect and request.language in ("auto", "chinese"):
            return self.config.languages[dialect]
        return None if request.language == "auto" else self.config.languages[request.language]

    def _speaker_row(self, request: SynthesisRequest) -> Tensor | None:
        """[1, hidden]: a built-in speaker's embedding or the x-vector of the reference; None for described voices."""
        if request.reference is not None:
            assert self.speaker_encoder is not None, "only base checkpoints are asked to clone"
            vector = self.speaker_encoder.embed(torch.from_numpy(request.reference.audio.copy()))
            return vector.to(self.pad)[None]
        if self.config.kind is ModelKind.CUSTOM_VOICE:
            assert request.voice is not None, "the ingress names a speaker"
            return self.talker.embed_codes([self.config.speakers[request.voice]])
        return None

    def _full_text_rows(self, body: list[int]) -> Tensor:
        text = torch.cat((self.talker.embed_text(body), self.eos))
        codec = self.talker.embed_codes([self.config.codes.pad, self.config.codes.bos])
        return torch.cat((text + codec[:1], self.pad + codec[1:]))

    def _clone_rows(self, request: GenerateRequest, body: list[int]) -> tuple[Tensor, Tensor]:
        """In-context cloning: the reference's text and frames come first, side by side or one after the other."""
        reference = request.synthesis.reference
        assert reference is not None
        assert reference.text is not None
        assert request.reference_codes is not None
        text = torch.cat((self.talker.embed_text(self.tokenizer.encode(reference.text) + body), self.eos))
        frames = torch.from_numpy(request.reference_codes).long().to(text.device)
        bos = self.talker.embed_codes([self.config.codes.bos])
        codec = torch.cat((bos, self.talker.embed_frames(frames)))
        if full_text(self.config.kind, request.synthesis):
            pad = self.talker.embed_codes([self.config.codes.pad])
            return torch.cat((text + pad, codec + self.pad)), self.pad
        if len(text) > len(codec):
            return text[: len(codec)] + codec, text[len(codec) :]
        padding = self.pad.expand(len(codec) - len(text), -1)
        return torch.cat((text, padding)) + codec, self.pad

    def _text(self, tokens: list[int]) -> Tensor:
        return self.talker.embed_text(tokens) if tokens else self.eos[:0]


def full_text(kind: ModelKind, request: SynthesisRequest) -> bool:
    """Whether all text stands in the prompt. Unasked, clones stream their text and the other kinds do not."""
    if request.non_streaming_mode is not None:
        return request.non_streaming_mode
    return kind is not ModelKind.BASE

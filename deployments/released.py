"""The released checkpoints: their names, the `config.json` each carries, and a tiny shape of the same architecture.

Ids follow one layout. Text: the tokenizer's own tokens, then the added ones in their fixed order. Codec: the codes,
then the control ids at fixed distances behind them. A shape is therefore a few numbers, and every id follows from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deployments.protocol import ModelKind

Json = dict[str, object]

REPOSITORIES = {
    "0.6B-Base": "Qwen/Qwen3-TTS-12Hz-0.6B-Base",
    "0.6B-CustomVoice": "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice",
    "1.7B-Base": "Qwen/Qwen3-TTS-12Hz-1.7B-Base",
    "1.7B-CustomVoice": "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice",
    "1.7B-VoiceDesign": "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign",
}

KINDS = {
    "Base": ModelKind.BASE,
    "CustomVoice": ModelKind.CUSTOM_VOICE,
    "VoiceDesign": ModelKind.VOICE_DESIGN,
}

# Distances behind the last code.
CONTROL_CODES = {
    "codec_pad_id": 100,
    "codec_bos_id": 101,
    "codec_eos_token_id": 102,
    "codec_think_id": 106,
    "codec_nothink_id": 107,
    "codec_think_bos_id": 108,
    "codec_think_eos_id": 109,
}
LANGUAGES = {
    "chinese": 7,
    "english": 2,
    "german": 5,
    "italian": 22,
    "portuguese": 23,
    "spanish": 6,
    "japanese": 10,
    "korean": 16,
    "french": 13,
    "russian": 21,
}
DIALECTS = {"beijing_dialect": 26, "sichuan_dialect": 14}
SPEAKERS = {
    "serena": 1018,
    "vivian": 1017,
    "uncle_fu": 962,
    "ryan": 1013,
    "aiden": 813,
    "ono_anna": 825,
    "sohee": 816,
    "eric": 827,
    "dylan": 830,
}
SPEAKER_DIALECTS = {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}
NUM_CONTROL_CODES = 1024

# Distances behind the tokenizer's own tokens.
CONTROL_TOKENS = {
    "im_start_token_id": 1,
    "im_end_token_id": 2,
    "tts_pad_token_id": 28,
    "tts_bos_token_id": 29,
    "tts_eos_token_id": 30,
}

GENERATION: Json = {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": 50,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_p": 1.0,
    "subtalker_top_k": 50,
    "max_new_tokens": 8192,
}


@dataclass(frozen=True, slots=True)
class StackShape:
    """Dimensions of a Qwen3 decoder stack."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def to_json(self, num_code_groups: int) -> Json:
        """The keys that the talker's and the predictor's configuration share."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "attention_bias": False,
            "attention_dropout": 0,
            "num_code_groups": num_code_groups,
            "use_sliding_window": False,
            "sliding_window": None,
        }


@dataclass(frozen=True, slots=True)
class Shape:
    """What tells one checkpoint of the architecture from another, tensors apart."""

    kind: ModelKind
    size: str  # tts_model_size
    talker: StackShape
    predictor: StackShape
    text_hidden: int = 2048
    text_tokens: int = 151643  # tokens the tokenizer makes itself
    text_vocab: int = 151936
    assistant_token: int = 77091
    num_codes: int = 2048
    num_code_groups: int = 16
    unit_scale: bool = False  # random weights: deviations that keep signals near 1 in narrow layers
    eos_scale: float = 1.0  # random weights: the end-of-speech row of the codec head is that much larger
    languages: Mapping[str, int] = field(default_factory=lambda: LANGUAGES)
    speakers: Mapping[str, int] = field(default_factory=lambda: SPEAKERS)
    dialects: Mapping[str, str] = field(default_factory=lambda: SPEAKER_DIALECTS)
    speaker_encoder: Mapping[str, object] = field(default_factory=dict)
    codec_decoder: Mapping[str, object] = field(default_factory=dict)  # what differs from the released codec
    codec_encoder: Mapping[str, object] = field(default_factory=dict)

    def with_official_text(self) -> "Shape":
        """The same model over the released tokenizer."""
        text = SHAPES["1.7B-Base"]
        return replace(
            self, text_tokens=text.text_tokens, text_vocab=text.text_vocab, assistant_token=text.assistant_token
        )

    def config_json(self) -> Json:
        """`config.json`."""
        config: Json = {
            "architectures": ["Qwen3TTSForConditionalGeneration"],
            "model_type": "qwen3_tts",
            "assistant_token_id": self.assistant_token,
            **{key: self.text_tokens + distance for key, distance in CONTROL_TOKENS.items()},
            "tokenizer_type": "qwen3_tts_tokenizer_12hz",
            "tts_model_size": self.size,
            "tts_model_type": self.kind.value,
            "talker_config": self._talker_json(),
        }
        if self.kind is ModelKind.BASE:
            encoder = {"enc_dim": self.talker.hidden, "sample_rate": 24000, **self.speaker_encoder}
            config["speaker_encoder_config"] = encoder
        return config

    def _talker_json(self) -> Json:
        named = self.kind is ModelKind.CUSTOM_VOICE
        languages = {**self.languages, **(DIALECTS if named and self.dialects else {})}
        speakers = self.speakers if named else {}
        third = self.talker.head_dim // 2 * 5 // 16  # of the rotary axes, two get a share and the first the rest
        sections = [self.talker.head_dim // 2 - 2 * third, third, third]
        return {
            **self.talker.to_json(self.num_code_groups),
            "vocab_size": self.num_codes + NUM_CONTROL_CODES,
            "text_vocab_size": self.text_vocab,
            "text_hidden_size": self.text_hidden,
            "initializer_range": 0.02,
            "max_position_embeddings": 32768,
            "position_id_per_seconds": 13,
            "use_cache": True,
            "rope_scaling": {"interleaved": True, "mrope_section": sections, "rope_type": "default", "type": "default"},
            **{key: self.num_codes + distance for key, distance in CONTROL_CODES.items()},
            "codec_language_id": {name: self.num_codes + distance for name, distance in languages.items()},
            "spk_id": {name: self.num_codes + distance for name, distance in speakers.items()},
            "spk_is_dialect": {name: self.dialects.get(name, False) for name in speakers},
            "code_predictor_config": self._predictor_json(),
        }

    def _predictor_json(self) -> Json:
        return {
            **self.predictor.to_json(self.num_code_groups),
            "vocab_size": self.num_codes,
            "max_position_embeddings": 65536,
            "rope_scaling": None,
            "max_window_layers": 28,
            "layer_types": ["full_attention"] * self.predictor.layers,
        }

    def codec_json(self) -> Json:
        """`speech_tokenizer/config.json`."""
        return {
            "architectures": ["Qwen3TTSTokenizerV2Model"],
            "model_type": "qwen3_tts_tokenizer_12hz",
            "encoder_valid_num_quantizers": self.num_code_groups,
            "input_sample_rate": 24000,
            "output_sample_rate": 24000,
            "decode_upsample_rate": 1920,
            "encode_downsample_rate": 1920,
            "decoder_config": {
                **_CODEC_DECODER,
                "codebook_size": self.num_codes,
                "num_quantizers": self.num_code_groups,
                **self.codec_decoder,
            },
            "encoder_config": {**_CODEC_ENCODER, "codebook_size": self.num_codes, **self.codec_encoder},
        }


_CODEC_DECODER: Json = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "latent_dim": 1024,
    "codebook_dim": 512,
    "decoder_dim": 1536,
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "layer_scale_initial_scale": 0.01,
    "max_position_embeddings": 8000,
    "head_dim": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "num_key_value_heads": 16,
    "num_quantizers": 16,
    "num_semantic_quantizers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "semantic_codebook_size": 4096,
    "sliding_window": 72,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
    "vector_quantization_hidden_dimension": 512,
}

_CODEC_ENCODER: Json = {
    "_frame_rate": 12.5,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "audio_channels": 1,
    "codebook_dim": 256,
    "compress": 2,
    "dilation_growth_rate": 2,
    "head_dim": 64,
    "hidden_act": "gelu",
    "hidden_size": 512,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "kernel_size": 7,
    "last_kernel_size": 3,
    "layer_scale_initial_scale": 0.01,
    "max_position_embeddings": 8000,
    "norm_eps": 1e-5,
    "normalize": False,
    "num_attention_heads": 8,
    "num_filters": 64,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "num_quantizers": 32,
    "num_residual_layers": 1,
    "num_semantic_quantizers": 1,
    "pad_mode": "constant",
    "residual_kernel_size": 3,
    "rope_theta": 10000.0,
    "sampling_rate": 24000,
    "sliding_window": 250,
    "trim_right_ratio": 1.0,
    "upsample_groups": 512,
    "upsampling_ratios": [8, 6, 5, 4],
    "use_cache": False,
    "use_causal_conv": True,
    "use_conv_shortcut": False,
    "use_streaming": False,
    "vector_quantization_hidden_dimension": 256,
}

_SMALL = StackShape(hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8, head_dim=128)
_LARGE = StackShape(hidden=2048, intermediate=6144, layers=28, heads=16, kv_heads=8, head_dim=128)
_PREDICTOR = StackShape(hidden=1024, intermediate=3072, layers=5, heads=16, kv_heads=8, head_dim=128)


def _tiny(kind: ModelKind) -> Shape:
    return Shape(
        kind=kind,
        size="1b7",  # the small size would drop instructions
        talker=StackShape(hidden=64, intermediate=128, layers=3, heads=4, kv_heads=2, head_dim=32),
        predictor=StackShape(hidden=48, intermediate=96, layers=2, heads=4, kv_heads=2, head_dim=16),
        text_hidden=64,
        text_tokens=264,
        text_vocab=512,
        assistant_token=263,
        unit_scale=True,
        eos_scale=3.0,
        speaker_encoder={
            "enc_channels": [64, 64, 64, 64, 192],
            "enc_attention_channels": 16,
            "enc_se_channels": 16,
        },
        codec_decoder={
            "latent_dim": 64,
            "codebook_dim": 32,
            "decoder_dim": 96,
            "hidden_size": 32,
            "intermediate_size": 64,
            "head_dim": 16,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
        },
        codec_encoder={
            "codebook_dim": 16,
            "head_dim": 16,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_filters": 8,
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "upsample_groups": 64,
            "vector_quantization_hidden_dimension": 16,
        },
    )


SHAPES = {
    "0.6B-Base": Shape(ModelKind.BASE, "0b6", _SMALL, _PREDICTOR),
    "0.6B-CustomVoice": Shape(ModelKind.CUSTOM_VOICE, "0b6", _SMALL, _PREDICTOR),
    "1.7B-Base": Shape(ModelKind.BASE, "1b7", _LARGE, _PREDICTOR),
    "1.7B-CustomVoice": Shape(ModelKind.CUSTOM_VOICE, "1b7", _LARGE, _PREDICTOR),
    "1.7B-VoiceDesign": Shape(ModelKind.VOICE_DESIGN, "1b7", _LARGE, _PREDICTOR),
    **{f"tiny-{name}": _tiny(kind) for name, kind in KINDS.items()},
}

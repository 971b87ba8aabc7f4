"""Dimensions of the demo voice, shared by all steps of the recipe."""

from deployments.codec.codec_config import SpeechTokenizerConfig
from talkray_tools.released import SHAPES, Json, Shape, changed
from tools.demo_voice.speakers import VOICES

_RELEASED = SHAPES["1.7B-CustomVoice"]
_TALKER = _RELEASED.config["talker_config"]
_TEXT_TOKENS = 512  # number of the tokenizer's own tokens; other ids follow
_OTHER_IDS = 1024  # ids of the talker's codec vocabulary that follow the codes
_PREDICTOR_LAYERS = 3
_NUM_CODES, _CODE_GROUPS = 512, 10  # entries per codebook, number of codebooks
# Channels of the codec's first upsampling layer. On a CPU with matrix units, 512 take little longer than 256, because
# its kernels work in blocks of 32, and the last layers have a sixteenth of the channels.
_DECODER_DIM = 512


def _moved(ids: Json, *, prefix: str = "", by: int) -> Json:
    """Return the ids among a configuration's values, shifted for a different number of tokens or codes."""
    return {
        key: value + by
        for key, value in ids.items()
        if key.startswith(prefix) and key.endswith("_id") and isinstance(value, int)
    }


def _shape() -> Shape:
    voices = {name: _NUM_CODES + 1001 + number for number, name in enumerate(VOICES)}
    predictor: Json = {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": _PREDICTOR_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_code_groups": _CODE_GROUPS,
        "vocab_size": _NUM_CODES,
        "layer_types": ["full_attention"] * _PREDICTOR_LAYERS,
    }
    talker: Json = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_code_groups": _CODE_GROUPS,
        "vocab_size": _NUM_CODES + _OTHER_IDS,
        "text_vocab_size": _TEXT_TOKENS + 64,
        "text_hidden_size": 256,
        "rope_scaling": {**_TALKER["rope_scaling"], "mrope_section": [12, 10, 10]},
        **_moved(_TALKER, prefix="codec_", by=_NUM_CODES - 2048),
        "codec_language_id": {"english": _NUM_CODES + 2},
        "spk_id": voices,
        "spk_is_dialect": dict.fromkeys(voices, False),
        "code_predictor_config": predictor,
    }
    codec: Json = {
        "encoder_valid_num_quantizers": _CODE_GROUPS,
        "decoder_config": {
            "latent_dim": 256,
            "codebook_dim": 256,
            "codebook_size": _NUM_CODES,
            "decoder_dim": _DECODER_DIM,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "num_quantizers": _CODE_GROUPS,
            "sliding_window": 20,  # shorter than the training windows, so all distances occur in training
            "vector_quantization_hidden_dimension": 64,
        },
        "encoder_config": {
            "codebook_dim": 64,
            "codebook_size": _NUM_CODES,
            "head_dim": 64,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_attention_heads": 4,
            "num_filters": 32,
            "num_hidden_layers": 0,  # only convolutions, so recordings of any length look like training windows
            "num_key_value_heads": 4,
            "num_quantizers": _CODE_GROUPS,
            "num_residual_layers": 2,
            "upsample_groups": 256,
            "vector_quantization_hidden_dimension": 64,
        },
    }
    return Shape(
        config=changed(
            _RELEASED.config,
            {
                **_moved(_RELEASED.config, by=_TEXT_TOKENS - _RELEASED.text_tokens),
                "assistant_token_id": _TEXT_TOKENS - 1,
                "talker_config": talker,
            },
        ),
        codec=changed(_RELEASED.codec, codec),
    )


SHAPE = _shape()


def codec_config() -> SpeechTokenizerConfig:
    """Return the codec's part of the shape."""
    return SpeechTokenizerConfig.from_dict(SHAPE.codec)


FRAME_SAMPLES = codec_config().frame_samples
# Codebooks 0 to 3 hold the sound of each quarter of a frame, as the teacher's numbers. The talker can learn them from
# text, and they are intelligible by themselves. The other codebooks hold the rest: pitch, loudness and the voice.
PHONES_PER_FRAME = 4
PHONE_SAMPLES = FRAME_SAMPLES // PHONES_PER_FRAME
NUM_PHONES = 178  # possible numbers of the teacher's phonemes; 0 is silence

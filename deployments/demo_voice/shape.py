"""The demo voice's dimensions, which every step of the recipe shares."""

from deployments.codec.config import SpeechTokenizerConfig
from deployments.protocol import ModelKind
from deployments.released import Shape, StackShape

TEXT_TOKENS = 512  # what the tokenizer makes itself; the added tokens follow

SHAPE = Shape(
    kind=ModelKind.CUSTOM_VOICE,
    size="1b7",
    talker=StackShape(hidden=256, intermediate=768, layers=6, heads=4, kv_heads=2, head_dim=64),
    predictor=StackShape(hidden=192, intermediate=512, layers=3, heads=4, kv_heads=2, head_dim=64),
    text_hidden=256,
    text_tokens=TEXT_TOKENS,
    text_vocab=TEXT_TOKENS + 64,
    assistant_token=TEXT_TOKENS - 1,
    num_codes=1024,
    num_code_groups=8,  # half of the released models': the predictor's steps dominate on two cores
    languages={"english": 2},
    speakers={"nora": 1001, "felix": 1002, "iris": 1003, "hugo": 1004},
    dialects={},
    codec_decoder={
        "latent_dim": 256,
        "codebook_dim": 256,
        "decoder_dim": 256,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "sliding_window": 20,  # within the windows of the training, so that no distance is new to it
        "vector_quantization_hidden_dimension": 64,
    },
    codec_encoder={
        "codebook_dim": 64,
        "head_dim": 64,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_filters": 32,
        "num_hidden_layers": 0,  # convolutions alone: recordings of any length look like the training's windows
        "num_key_value_heads": 4,
        "num_quantizers": 8,
        "num_residual_layers": 2,
        "upsample_groups": 256,
        "vector_quantization_hidden_dimension": 64,
    },
)


def codec_config() -> SpeechTokenizerConfig:
    """The codec's part of the shape."""
    return SpeechTokenizerConfig.from_dict(SHAPE.codec_json())


FRAME_SAMPLES = codec_config().frame_samples
# Codebooks 0 to 3 say which sound each quarter of a frame is, in the teacher's numbers: what is said can then be learnt
# from text, and codes can be understood whatever the others are. Those hold the rest: pitch, loudness, the voice.
PHONES_PER_FRAME = 4
PHONE_SAMPLES = FRAME_SAMPLES // PHONES_PER_FRAME
NUM_PHONES = 178  # numbers that the teacher's phonemes may have; 0 is silence

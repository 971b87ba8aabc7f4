"""The shape of the speaker encoder of a base checkpoint, and of the spectrogram that it reads."""

from dataclasses import dataclass

# The front end the released encoders were trained on; no configuration names it.
FFT_SIZE = 1024
HOP = 256
MAX_HZ = 12000.0
PADDING = (FFT_SIZE - HOP) // 2


@dataclass(frozen=True, slots=True)
class SpeakerEncoderConfig:
    """`speaker_encoder_config`; the released files leave out fields that equal these defaults."""

    enc_dim: int = 1024
    mel_dim: int = 128
    enc_channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: tuple[int, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: int = 128
    enc_res2net_scale: int = 8
    enc_se_channels: int = 128
    sample_rate: int = 24000

    @property
    def min_samples(self) -> int:
        """The shortest audio whose spectrogram is longer than any layer's reflection at an edge."""
        reflected = ((k - 1) * d // 2 for k, d in zip(self.enc_kernel_sizes, self.enc_dilations, strict=True))
        return max(PADDING + 1, (max(reflected) + 1) * HOP)

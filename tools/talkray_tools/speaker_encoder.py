"""Speaker recognition with Resemblyzer's network (Apache-2.0), whose package includes the weights."""

from pathlib import Path
from typing import BinaryIO

import numpy as np
import soxr
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Audio = NDArray[np.float32]


class VoiceJudge(nn.Module):
    """Resemblyzer's network. Vectors of the same speaker have a cosine similarity near 1."""

    _RATE, _FFT, _HOP, _BANDS, _WINDOW = 16000, 400, 160, 40, 160
    _LEAST_LEVEL = 10 ** (-30 / 20)

    def __init__(self, stored: BinaryIO | Path, sample_rate: int) -> None:
        """Load the network. `stored` is pretrained.pt of the package; `sample_rate` is the speech's sample rate."""
        super().__init__()
        self._sample_rate = sample_rate
        self.lstm = nn.LSTM(self._BANDS, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)
        state = torch.load(stored, map_location="cpu", weights_only=False)["model_state"]
        self.load_state_dict({name: value for name, value in state.items() if name.startswith(("lstm", "linear"))})
        self.filters = _mel_filters(self._BANDS, self._FFT, self._RATE)

    @torch.inference_mode()
    def vector(self, audio: Audio) -> Tensor:
        """Return the speaker vector of [samples]: [256], of unit length. Silence follows less than 1.6 s of speech."""
        heard = torch.from_numpy(soxr.resample(audio, self._sample_rate, self._RATE))
        heard = heard * max(1.0, self._LEAST_LEVEL / float(heard.square().mean().sqrt()))
        heard = nn.functional.pad(heard, (0, max(0, self._WINDOW * self._HOP - len(heard))))
        window = torch.hann_window(self._FFT)
        spectrum = torch.stft(heard, self._FFT, self._HOP, window=window, pad_mode="constant", return_complex=True)
        mel = (self.filters @ spectrum.abs().square()).T
        _, (hidden, _) = self.lstm(mel.unfold(0, self._WINDOW, self._WINDOW // 2).transpose(1, 2))
        vectors = nn.functional.normalize(torch.relu(self.linear(hidden[-1])))
        return nn.functional.normalize(vectors.mean(0), dim=0)


def _mel_filters(bands: int, size: int, rate: int) -> Tensor:
    """Return Slaney's triangular filters with equal area, [bands, size / 2 + 1]."""
    top = 15 + 27 * np.log(rate / 2000) / np.log(6.4)
    mel = np.linspace(0, top, bands + 2)
    edges = np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))
    distances = edges[:, None] - np.linspace(0, rate / 2, size // 2 + 1)
    widths = np.diff(edges)
    triangles = np.minimum(-distances[:-2] / widths[:-1, None], distances[2:] / widths[1:, None]).clip(0)
    return torch.from_numpy(triangles * (2 / (edges[2:] - edges[:-2]))[:, None]).float()

"""Compare the decoder's convolutions with products of the same sizes in cuBLAS.
`python -m tools.experiments.gpu.convolutions`.

A convolution of 7 taps over C channels is a product of [rows, 7 C] and [7 C, C]. Ours also applies the next layer's
activation. The table lists the time of all such convolutions in one call, between CUDA events around graph replays.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deployments.codec.backends import triton_kernels
from deployments.codec.backends.triton_decoder import TritonDecoder
from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.codec.fold import FoldedWeights, fold
from deployments.gpu.graphs import Graphs
from talkray_tools.random_codec import randomize_decoder
from talkray_tools.released import SHAPES
from talkray_tools.unfolded_codec import DecoderNetwork

_FRAMES, _TAPS = 4, 7
_SIZES = slice(9, 13)  # the kernel's arguments `streams`, `time`, `num_in` and `num_out`
Launch = tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]


class LaunchRecorder:
    """Replaces the kernel of convolutions: runs it, and stores the launches of those with 7 taps."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.launches = kernel, list[Launch]()

    def run(self, grid: tuple[int, int], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._kernel[grid](*arguments, **options)

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self.run(grid, arguments, options)
            if options["taps"] == _TAPS:
                self.launches.append((grid, arguments, options))

        return launch


def random_weights() -> FoldedWeights:
    network = DecoderNetwork(SpeechTokenizerConfig.from_dict(SHAPES["1.7B-CustomVoice"].codec).decoder)
    randomize_decoder(network, generator=torch.Generator().manual_seed(0))
    return fold(network.state_dict(), network.config)


def products(launches: Sequence[Launch]) -> list[tuple[Tensor, Tensor]]:
    """Return matrices, whose products have the sizes of the convolutions."""
    random = partial(torch.randn, device="cuda", dtype=torch.float16)
    sizes = [arguments[_SIZES] for _, arguments, _ in launches]
    return [
        (random((streams * time, _TAPS * num_in)), random((_TAPS * num_in, num_out)))
        for streams, time, num_in, num_out in sizes
    ]


def device_us(call: Callable[..., object], arguments: Sequence[Any], repeats: int) -> float:
    """Return the device time of calls with each of `arguments`, in microseconds."""
    graphs = Graphs()
    graphs.capture("calls", lambda: [call(*each) for each in arguments])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(repeats):
        graphs.replay("calls")
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="each with 4 frames")
    parser.add_argument("--repeats", type=int, default=50, help="replays per measurement")
    options, device = parser.parse_args(), torch.device("cuda")
    folded, num_slots = random_weights(), max(options.streams)
    decoder = TritonDecoder(folded, num_slots=num_slots, code_ring=32, device=device, dtype=torch.float16)
    kernel = triton_kernels.conv_kernel
    print(f"{torch.cuda.get_device_name()}\n{'frames':>8}{'ours, us':>12}{'cuBLAS, us':>12}{'ratio':>8}")
    for streams in options.streams:
        triton_kernels.conv_kernel = recorder = LaunchRecorder(kernel)
        decoder.decode(torch.arange(streams, device=device, dtype=torch.int32), _FRAMES)
        ours = device_us(recorder.run, recorder.launches, options.repeats)
        theirs = device_us(torch.mm, products(recorder.launches), options.repeats)
        print(f"{streams * _FRAMES:>8}{ours:>12.0f}{theirs:>12.0f}{ours / theirs:>8.2f}", flush=True)


if __name__ == "__main__":
    main()

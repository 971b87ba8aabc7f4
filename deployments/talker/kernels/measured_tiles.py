"""Written by `python -m tools.kernels.sweep --save` on one NVIDIA H200.

(columns, depth, gated) -> by number of rows: form, block_n, block_k, warps, stages, chains, block_m.
Set by hand, by the time of whole steps: 16 rows of the talker and 32 rows of everything are the tiles of 64 rows.
"""

MEASURED: dict[tuple[int, int, bool], dict[int, tuple[str, int, int, int, int, int, int]]] = {
    (2048, 1024, False): {
        1: ("vector", 16, 256, 8, 1, 1, 16),
        2: ("vector", 8, 256, 8, 1, 1, 16),
        16: ("split", 16, 256, 4, 1, 1, 16),
        32: ("pipelined", 16, 128, 4, 6, 1, 64),
        64: ("pipelined", 16, 128, 4, 6, 1, 16),
        128: ("pipelined", 32, 128, 4, 6, 1, 64),
    },
    (3072, 2048, False): {
        1: ("vector", 8, 256, 8, 1, 1, 16),
        2: ("pipelined", 32, 128, 4, 6, 1, 16),
        16: ("pipelined", 32, 128, 4, 6, 1, 16),
        32: ("pipelined", 32, 128, 4, 6, 1, 64),
        64: ("pipelined", 32, 128, 4, 6, 1, 16),
        128: ("pipelined", 64, 64, 4, 6, 1, 64),
    },
    (1024, 3072, False): {
        1: ("vector", 8, 256, 8, 1, 1, 16),
        2: ("vector", 8, 256, 8, 1, 1, 16),
        4: ("vector", 4, 256, 4, 1, 1, 16),
        16: ("split", 16, 128, 8, 1, 1, 16),
        32: ("pipelined", 16, 256, 4, 4, 4, 64),
        64: ("pipelined", 16, 256, 4, 4, 4, 16),
        128: ("pipelined", 16, 256, 4, 4, 4, 64),
    },
    (3072, 1024, True): {
        1: ("vector", 16, 256, 8, 1, 1, 16),
        2: ("pipelined", 32, 128, 4, 6, 1, 16),
        4: ("pipelined", 32, 128, 4, 6, 1, 16),
        16: ("pipelined", 32, 128, 4, 6, 1, 16),
        32: ("pipelined", 32, 128, 4, 6, 1, 64),
        64: ("pipelined", 32, 128, 4, 6, 1, 16),
        128: ("pipelined", 64, 64, 4, 6, 1, 64),
    },
    (1024, 2048, False): {
        1: ("vector", 8, 256, 8, 1, 1, 16),
        2: ("vector", 4, 256, 8, 1, 1, 16),
        4: ("split", 16, 256, 8, 1, 1, 16),
        16: ("split", 16, 256, 8, 1, 1, 16),
        32: ("pipelined", 16, 256, 4, 4, 4, 64),
        64: ("pipelined", 16, 256, 4, 4, 4, 16),
        128: ("pipelined", 16, 256, 4, 4, 4, 64),
    },
    (4096, 1024, False): {
        1: ("vector", 8, 256, 8, 1, 1, 16),
        2: ("vector", 4, 256, 4, 1, 1, 16),
        4: ("pipelined", 32, 128, 4, 6, 1, 16),
        16: ("pipelined", 32, 128, 4, 6, 1, 16),
        32: ("pipelined", 32, 128, 4, 6, 1, 64),
        64: ("pipelined", 32, 128, 4, 6, 1, 16),
        128: ("pipelined", 64, 64, 4, 6, 1, 64),
    },
    (2048, 6144, False): {
        1: ("vector", 2, 256, 4, 1, 1, 16),
        2: ("vector", 4, 256, 4, 1, 1, 16),
        16: ("pipelined", 16, 256, 4, 4, 4, 64),
        32: ("pipelined", 16, 256, 4, 4, 4, 64),
        64: ("pipelined", 16, 256, 4, 4, 4, 16),
        128: ("pipelined", 32, 128, 4, 6, 2, 64),
    },
    (6144, 2048, True): {
        1: ("vector", 2, 256, 4, 1, 1, 16),
        2: ("pipelined", 32, 128, 4, 4, 1, 16),
        16: ("pipelined", 64, 64, 4, 6, 1, 64),
        32: ("pipelined", 64, 64, 4, 6, 1, 64),
        64: ("pipelined", 64, 64, 4, 6, 1, 16),
        128: ("pipelined", 64, 64, 8, 6, 1, 16),
    },
    (2048, 2048, False): {
        1: ("vector", 16, 256, 8, 1, 1, 16),
        2: ("vector", 8, 256, 8, 1, 1, 16),
        16: ("pipelined", 16, 256, 4, 4, 4, 64),
        32: ("pipelined", 16, 256, 4, 4, 4, 64),
        64: ("pipelined", 16, 256, 4, 4, 4, 16),
        128: ("pipelined", 32, 128, 4, 6, 2, 64),
    },
    (4096, 2048, False): {
        1: ("vector", 4, 256, 4, 1, 1, 16),
        2: ("pipelined", 32, 128, 4, 6, 1, 16),
        16: ("pipelined", 32, 128, 4, 6, 1, 64),
        32: ("pipelined", 32, 128, 4, 6, 1, 64),
        64: ("pipelined", 32, 128, 4, 6, 1, 16),
        128: ("pipelined", 64, 64, 4, 6, 1, 64),
    },
}

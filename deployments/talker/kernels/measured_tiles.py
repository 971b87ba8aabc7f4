"""Written by `python -m deployments.talker.kernels.sweep --save` on one NVIDIA H200.

(columns, depth, gated) -> by number of rows: form, block_n, block_k, warps, stages, chains.
"""

MEASURED: dict[tuple[int, int, bool], dict[int, tuple[str, int, int, int, int, int]]] = {
    (2048, 1024, False): {
        1: ("vector", 16, 256, 8, 1, 1),
        2: ("vector", 8, 256, 8, 1, 1),
        16: ("split", 16, 256, 4, 1, 1),
        32: ("pipelined", 16, 256, 2, 4, 1),
        64: ("pipelined", 16, 128, 4, 6, 1),
    },
    (3072, 2048, False): {
        1: ("vector", 8, 256, 8, 1, 1),
        2: ("split", 16, 256, 4, 1, 1),
        16: ("pipelined", 32, 128, 4, 6, 1),
        32: ("pipelined", 16, 256, 2, 4, 1),
        64: ("pipelined", 32, 128, 4, 6, 1),
    },
    (1024, 3072, False): {
        1: ("vector", 16, 256, 8, 1, 1),
        2: ("vector", 8, 256, 8, 1, 1),
        4: ("vector", 4, 256, 4, 1, 1),
        16: ("split", 16, 128, 8, 1, 1),
        32: ("pipelined", 16, 256, 2, 4, 1),
        64: ("pipelined", 16, 128, 4, 6, 1),
        128: ("pipelined", 16, 128, 4, 6, 1),
    },
    (3072, 1024, True): {
        1: ("vector", 16, 256, 8, 1, 1),
        2: ("pipelined", 32, 128, 4, 6, 1),
        4: ("pipelined", 32, 128, 4, 6, 1),
        16: ("pipelined", 32, 128, 4, 6, 1),
        32: ("pipelined", 16, 256, 2, 4, 1),
        64: ("pipelined", 32, 128, 4, 4, 1),
        128: ("pipelined", 32, 128, 4, 4, 1),
    },
    (1024, 2048, False): {
        1: ("vector", 8, 256, 8, 1, 1),
        2: ("vector", 4, 256, 8, 1, 1),
        4: ("split", 16, 256, 8, 1, 1),
        16: ("split", 16, 256, 8, 1, 1),
        32: ("pipelined", 16, 256, 4, 4, 1),
        64: ("pipelined", 16, 256, 4, 4, 1),
        128: ("pipelined", 16, 128, 4, 6, 1),
    },
    (4096, 1024, False): {
        1: ("vector", 16, 256, 8, 1, 1),
        2: ("vector", 4, 256, 4, 1, 1),
        4: ("pipelined", 32, 128, 4, 6, 1),
        16: ("pipelined", 32, 128, 4, 6, 1),
        32: ("pipelined", 32, 128, 4, 4, 1),
        64: ("pipelined", 32, 128, 4, 6, 1),
        128: ("pipelined", 32, 128, 4, 4, 1),
    },
    (2048, 6144, False): {
        1: ("vector", 2, 256, 4, 1, 1),
        2: ("vector", 4, 256, 4, 1, 1),
        16: ("pipelined", 16, 256, 4, 4, 1),
        32: ("pipelined", 16, 256, 2, 4, 1),
        64: ("pipelined", 16, 128, 4, 6, 1),
    },
    (6144, 2048, True): {
        1: ("vector", 4, 256, 8, 1, 1),
        2: ("pipelined", 64, 64, 4, 6, 1),
        16: ("pipelined", 64, 64, 4, 6, 1),
        32: ("pipelined", 64, 64, 4, 6, 1),
        64: ("pipelined", 64, 64, 4, 6, 1),
    },
    (2048, 2048, False): {
        1: ("vector", 16, 256, 8, 1, 1),
        2: ("vector", 8, 256, 8, 1, 1),
        16: ("split", 16, 256, 4, 1, 1),
        32: ("pipelined", 16, 256, 4, 4, 1),
        64: ("pipelined", 16, 128, 4, 6, 1),
    },
    (4096, 2048, False): {
        1: ("vector", 4, 256, 4, 1, 1),
        2: ("pipelined", 32, 128, 4, 6, 1),
        16: ("pipelined", 32, 128, 4, 6, 1),
        32: ("pipelined", 32, 128, 4, 6, 1),
        64: ("pipelined", 32, 128, 4, 6, 1),
    },
}

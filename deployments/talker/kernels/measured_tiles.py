"""Written by `python -m deployments.talker.kernels.sweep --save` on one NVIDIA H200.

(columns, depth, gated) -> by number of rows: form, block_n, block_k, warps, stages, dependent launch.
"""

MEASURED: dict[tuple[int, int, bool], dict[int, tuple[str, int, int, int, int, bool]]] = {
    (4096, 2048, False): {
        1: ("vector", 8, 256, 8, 1, True),
        4: ("vector", 8, 256, 8, 1, True),
        8: ("pipelined", 16, 256, 2, 4, False),
        32: ("pipelined", 16, 256, 2, 4, False),
        64: ("pipelined", 32, 128, 4, 6, False),
    },
    (2048, 2048, False): {
        1: ("vector", 4, 256, 4, 1, True),
        4: ("vector", 4, 256, 4, 1, True),
        8: ("pipelined", 16, 256, 4, 4, False),
        32: ("pipelined", 16, 256, 2, 4, False),
        64: ("pipelined", 16, 256, 4, 4, True),
    },
    (6144, 2048, True): {
        1: ("vector", 2, 256, 4, 1, True),
        4: ("vector", 2, 256, 4, 1, True),
        8: ("pipelined", 32, 128, 4, 4, False),
        32: ("pipelined", 64, 64, 4, 6, False),
        64: ("pipelined", 64, 64, 4, 6, False),
    },
    (2048, 6144, False): {
        1: ("vector", 4, 256, 8, 1, True),
        4: ("vector", 4, 256, 8, 1, True),
        8: ("pipelined", 16, 128, 4, 6, False),
        32: ("pipelined", 16, 256, 4, 4, False),
        64: ("pipelined", 16, 128, 4, 6, False),
    },
    (4096, 1024, False): {
        1: ("vector", 4, 256, 8, 1, True),
        4: ("vector", 4, 256, 8, 1, True),
        8: ("pipelined", 16, 128, 2, 6, False),
        32: ("pipelined", 32, 128, 4, 4, False),
        64: ("pipelined", 32, 128, 4, 6, True),
    },
    (1024, 2048, False): {
        1: ("vector", 8, 256, 8, 1, True),
        4: ("vector", 8, 256, 8, 1, True),
        8: ("pipelined", 16, 256, 4, 4, False),
        32: ("pipelined", 16, 256, 2, 4, False),
        64: ("pipelined", 16, 256, 4, 4, True),
    },
    (3072, 1024, True): {
        1: ("vector", 8, 256, 8, 1, True),
        4: ("vector", 8, 256, 8, 1, True),
        8: ("pipelined", 32, 128, 4, 6, False),
        32: ("pipelined", 16, 128, 2, 6, True),
        64: ("pipelined", 32, 128, 4, 4, True),
    },
    (1024, 3072, False): {
        1: ("vector", 8, 256, 8, 1, True),
        4: ("vector", 8, 256, 8, 1, True),
        8: ("pipelined", 16, 128, 4, 6, False),
        32: ("pipelined", 16, 256, 4, 4, False),
        64: ("pipelined", 16, 128, 4, 6, True),
    },
    (3072, 2048, False): {
        1: ("vector", 4, 256, 4, 1, True),
        4: ("vector", 4, 256, 4, 1, True),
        8: ("pipelined", 16, 256, 2, 4, False),
        32: ("pipelined", 16, 128, 2, 6, False),
        64: ("pipelined", 32, 128, 4, 6, True),
    },
    (2048, 1024, False): {
        1: ("vector", 4, 256, 8, 1, True),
        4: ("vector", 4, 256, 8, 1, True),
        8: ("pipelined", 16, 128, 2, 6, False),
        32: ("pipelined", 16, 256, 2, 4, False),
        64: ("pipelined", 16, 128, 4, 6, True),
    },
}

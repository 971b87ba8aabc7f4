"""From logits to codes. Three samplers choose the same code; tests compare them on random logits.

| file                | samples                                                                                      |
|---------------------|----------------------------------------------------------------------------------------------|
| `triton_sampler.py` | in `fused` networks (`networks/registry.py` has the kinds)                                   |
| `c_sampler.c`       | in the other networks on a CPU, where a C compiler built it; `torch_sampler.py` calls it     |
| `torch_sampler.py`  | in the other networks: on a GPU, without a C compiler, and with other noise, as of `verify`  |
"""

"""Samplers, which convert logits to codes. All three sample the same codes; tests compare them on random logits.

| file                | used for                                                                                     |
|---------------------|----------------------------------------------------------------------------------------------|
| `triton_sampler.py` | `fused` networks (`networks/registry.py` lists the kinds)                                    |
| `c_sampler.c`       | other networks on a CPU, if a C compiler is available; called by `torch_sampler.py`          |
| `torch_sampler.py`  | other networks on a GPU, without a C compiler, and with other noise, such as for `verify`    |
"""

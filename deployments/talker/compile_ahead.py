"""When the engine compiles its kernels: ahead and in parallel on the first start, not at all on the next."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deployments.talker.start_clock import StartClock, throttled

_PACKAGE = Path(__file__).parent.parent

Prepare = Callable[[Callable[[], None]], None]
"""Makes sure that the kernels which some work launches are compiled; runs it without launching them."""


def prepare_nothing(work: Callable[[], None]) -> None:
    """Leave each kernel to its first launch."""


@contextmanager
def compiling_ahead(clock: StartClock, facts: str) -> Iterator[Prepare]:
    """Offer a `Prepare`. `facts` is what the kernels depend on besides code and versions.

    The cache remembers for which facts all was compiled; where some of it was deleted since, launches compile it.
    """
    import triton  # a CPU has none
    from triton import knobs

    from deployments.kernel_compiler import CompileWorkers, noted_launches

    stamp = Path(knobs.cache.dir) / "complete" / _digest(f"{triton.__version__} {facts}")
    if stamp.exists():
        yield prepare_nothing
        return
    with CompileWorkers() as workers:

        def prepare(work: Callable[[], None]) -> None:
            with clock.phase("looking for kernels to compile"), noted_launches() as kernels:
                work()
            with clock.phase("compiling kernels"):
                workers.compile(kernels, throttled("compiling kernels", clock.report))

        yield prepare
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.touch()


def _digest(facts: str) -> str:
    state = hashlib.sha256(facts.encode())
    for file in sorted(_PACKAGE.rglob("*.py")):
        state.update(file.read_bytes())
    return state.hexdigest()[:32]

"""Needs root and network namespaces."""

import pytest

from tools.experiments.fleet import namespaces


@pytest.fixture(scope="session")
def possible() -> None:
    """Machines of our own."""
    obstacle = namespaces.why_impossible()
    if obstacle is not None:
        pytest.skip(f"no namespaces ({obstacle}): `make faults` kills and drains hosts that share this machine's")

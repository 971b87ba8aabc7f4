"""Needs root and network namespaces."""

from pathlib import Path

import pytest

from tools.experiments.fleet import namespaces


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.fleet)


@pytest.fixture(scope="session")
def possible() -> None:
    """Machines of our own."""
    obstacle = namespaces.why_impossible()
    if obstacle is not None:
        pytest.skip(f"no namespaces ({obstacle}): `make faults` kills and drains hosts that share this machine's")

"""Measurements of one replica, used for plans, and selection of the table that best matches a machine.

A table is a JSON file with the model, host, date, commit and command of a measurement, and a row for each rate.
`talkray plan --measure` writes a table; `tables/` contains the tables of this project's hosts.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from deployments.errors import InvalidRequest
from loadtest.measured import MeasuredRate

FOLDER = Path(__file__).parent / "tables"
CPU = "none"  # value of `gpu` without a GPU
# GB/s of memory, from the vendors' data sheets. Each frame reads all weights, so bandwidth limits the frame rate.
BANDWIDTH = {
    "B200": 8000, "H200": 4800, "H100": 3350, "A100": 2039, "RTX 5090": 1792, "RTX PRO 6000": 1792, "RTX 4090": 1008,
    "L40S": 864, "A6000": 768, "A10G": 600, "A10": 600, "L4": 300,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """Measured rates of one replica of a model on one kind of machine."""

    model: str  # for example 1.7B-CustomVoice or embedded
    gpu: str  # a name in BANDWIDTH, the driver's name if it is not there, or "none"
    cores: int  # CPU cores of the host per GPU
    max_num_seqs: int
    host: str
    date: str
    commit: str
    command: str
    weights: str
    note: str
    rows: tuple[MeasuredRate, ...]

    @property
    def source(self) -> str:
        return f"{self.host}, {self.date}, commit {self.commit}"

    @property
    def highest(self) -> MeasuredRate:
        """Highest rate that the replica sustained, which limits plans. Raises `InvalidRequest` if no rate was
        sustained.
        """
        carried = [row for row in self.rows if row.is_carried and not row.is_held_out]
        if not carried:
            raise InvalidRequest(f"no rate in the table of {self.source} was sustained. Measure lower rates")
        return max(carried, key=lambda row: row.audio_per_s)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        rows = tuple(MeasuredRate.from_json(row) for row in record["rows"])
        return cls(**{**record, "rows": rows})

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_table(file: Path) -> MeasuredTable:
    """Read a table. Raises `InvalidRequest` if the file is missing or invalid."""
    try:
        return MeasuredTable.from_json(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{file} is not a table of measured rates ({error}): use a file from --measure") from error


def shipped() -> list[MeasuredTable]:
    return [read_table(file) for file in sorted(FOLDER.glob("*.json"))]


def known_gpu(name: str) -> str:
    """Return the longest BANDWIDTH name contained in `name`, else `name` itself."""
    words = name.upper().replace("-", " ")
    found = [each for each in BANDWIDTH if each in words]
    return max(found, key=len) if found else name


@dataclass(frozen=True, slots=True)
class Basis:
    """Basis of a plan: a table, and the assumed slowdown of the planned machine."""

    table: MeasuredTable
    slower: float = 1.0
    reasons: tuple[str, ...] = ()  # why the table does not apply directly; empty if measured on such a machine

    @property
    def source(self) -> str:
        """Source of the numbers: "measured on ...", or "estimated from ..." with the reasons."""
        if not self.reasons:
            return f"measured: {self.table.source}"
        return f"estimated from {self.table.source}: {'; '.join(self.reasons)}"


def choose(tables: Sequence[MeasuredTable], *, model: str, gpu: str, cores: int) -> Basis:
    """Return the table for this model and GPU, else the closest table with assumptions. Raises `InvalidRequest`."""
    found = [_basis(table, model=model, gpu=known_gpu(gpu), cores=cores) for table in tables]
    fitting = [basis for basis in found if basis is not None]
    if not fitting:
        measured = sorted({f"{table.model} on {_machine(table.gpu)}" for table in tables})
        raise InvalidRequest(
            f"{model} has not been measured on {_machine(gpu)}. Run `talkray plan --measure FILE` "
            f"there. Measured: {', '.join(measured)}"
        )
    return min(fitting, key=lambda basis: (len(basis.reasons), basis.slower))


def _machine(gpu: str) -> str:
    return "CPUs" if gpu == CPU else gpu


def _basis(table: MeasuredTable, *, model: str, gpu: str, cores: int) -> Basis | None:
    """Return the basis derived from one table, or None if the table does not apply."""
    reasons = list(_other_model(table.model, model))
    if table.model != model and not reasons:
        return None
    slower = 1.0
    if table.gpu != gpu:
        if gpu not in BANDWIDTH or table.gpu not in BANDWIDTH:
            return None
        slower = max(1.0, BANDWIDTH[table.gpu] / BANDWIDTH[gpu])
        reasons.append(f"a frame on {gpu} takes {slower:.2f} times as long as on {table.gpu}, by memory bandwidth")
    if cores < table.cores:
        reasons.append(f"{cores} cores per GPU are assumed to be enough; the measurement had {table.cores}")
    return Basis(table, slower, tuple(reasons))


def _other_model(measured: str, wanted: str) -> Iterator[str]:
    if measured == wanted or "embedded" in (measured, wanted):
        return
    if measured.split("-")[0] == wanted.split("-")[0]:
        yield f"{wanted} has the shape of {measured} (cloning a new recording adds about 40 ms to its first request)"
    elif measured.startswith("1.7B") and wanted.startswith("0.6B"):
        yield f"{wanted} is at most as slow as {measured}"

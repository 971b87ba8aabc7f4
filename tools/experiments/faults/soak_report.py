"""What a soak saw, and whether it is what must be: pure functions of its records."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tools.experiments.faults.kills import percentile
from tools.experiments.faults.polite import Stream
from tools.experiments.faults.supervised import CARRIERS, KINDS, VITAL, Held, ServerStart

BACK_S = 60.0  # speech is back within that time, whatever died
CUT_S = 5.0  # a stream that its ingress or proxy took with it has ended by then
DOWN_S = 12.0  # a server that has lost a vital process has ended all streams by then
SPOKEN_S = 5.0  # a request that waits longer is not spoken "right then"
FLAT = 1.1  # memory and open files at the end, as a share of what they were


@dataclass(slots=True)
class SoakKill:
    """One process that was killed. Times are of time.monotonic()."""

    kind: str
    at_s: float
    open_streams: int
    back_s: float | None = None  # until a request that was made afterwards had been spoken


@dataclass(frozen=True, slots=True)
class Probe:
    """`/ready`, a short request at the same moment, and `/ready` again."""

    asked_s: float
    answered_s: float
    before: int | str
    speech: int | str
    after: int | str

    @property
    def spoken(self) -> bool:
        return self.speech == 200


@dataclass(frozen=True, slots=True)
class Survey:
    """What the processes hold at one moment."""

    at_s: float
    processes: dict[int, Held]

    @property
    def mebibytes(self) -> float:
        return sum(each.mebibytes for each in self.processes.values())

    @property
    def files(self) -> int:
        return sum(each.files for each in self.processes.values())

    def of(self, kind: str) -> tuple[float, int]:
        """MiB and files of one kind of process."""
        each = [one for one in self.processes.values() if one.kind == kind]
        return sum(one.mebibytes for one in each), sum(one.files for one in each)


@dataclass(slots=True)
class SoakRecords:
    """Everything that was seen."""

    began_s: float
    kills_wanted: int
    streams: list[Stream] = field(default_factory=list)
    kills: list[SoakKill] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    ready: list[tuple[float, int | str]] = field(default_factory=list)
    surveys: list[Survey] = field(default_factory=list)
    starts: list[ServerStart] = field(default_factory=list)
    hostile: list[tuple[str, str]] = field(default_factory=list)
    rotations: int = 0
    key_faults: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # of the soak itself
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)  # of surveys, by name
    folders: tuple[int, int] = (0, 0)  # of servers, at the start and at the end


def blame(stream: Stream, kills: Sequence[SoakKill]) -> str:
    """Whose death took a stream: that of what carried it, that of its server, or nobody's, which is a fault."""

    def killed(kinds: Iterable[str], within_s: float) -> bool:
        return any(kill.kind in kinds and kill.at_s - 0.1 <= stream.ended_s <= kill.at_s + within_s for kill in kills)

    if killed(CARRIERS, CUT_S):
        return "ingress or proxy"
    return "server" if killed(VITAL, DOWN_S) else "other"


def lies(records: SoakRecords) -> list[str]:
    """Moments at which `/ready` said yes and nothing was spoken, or no while there was speech."""
    found = []
    for probe in records.probes:
        if any(probe.asked_s - 0.1 <= kill.at_s <= probe.answered_s for kill in records.kills) and not probe.spoken:
            continue  # it died between the questions
        said = (probe.before, probe.after)
        if said == (200, 200) and not probe.spoken and probe.speech != 429:  # too many ask: it speaks to others
            found.append(f"at {probe.asked_s - records.began_s:.0f} s ready, and speech got {probe.speech}")
        if 200 not in said and probe.spoken and probe.answered_s - probe.asked_s < 1.0:
            found.append(f"at {probe.asked_s - records.began_s:.0f} s not ready ({said}), and it spoke")
    for asked_s, answered_s in ((probe.asked_s, probe.answered_s) for probe in records.probes):
        for at_s, answer in records.ready:
            if answer == 200 and asked_s + SPOKEN_S < at_s < answered_s - 0.5:
                found.append(f"at {at_s - records.began_s:.0f} s ready, and a request waits for {at_s - asked_s:.0f} s")
    return found


def spoken(records: SoakRecords) -> list[tuple[float, float]]:
    """When each request was made that was spoken, and when its first audio came (of a short one: all of it)."""
    probes = [(probe.asked_s, probe.answered_s) for probe in records.probes if probe.spoken]
    return probes + [(each.began_s, each.first_s) for each in records.streams if each.first_s is not None]


def back_s(kill: SoakKill, requests: Sequence[tuple[float, float]], started_s: Sequence[float]) -> float | None:
    """From a death to the first audio of a request that was made after it.

    Where the server dies of it, only what its successor speaks counts.
    """
    from_s = kill.at_s
    if kill.kind in VITAL:
        from_s = min((each for each in started_s if each > kill.at_s), default=float("inf"))
    return min((at_s - kill.at_s for asked_s, at_s in requests if asked_s > from_s), default=None)


def median_of(surveys: Sequence[Survey], span: tuple[float, float], kind: str | None) -> tuple[float, float]:
    """MiB and files of a kind of process, or of all, in the middle of what was seen in that time."""
    seen = [each for each in surveys if span[0] <= each.at_s <= span[1]]
    pairs = [each.of(kind) if kind else (each.mebibytes, each.files) for each in seen] or [(0.0, 0)]
    return statistics.median(mebibytes for mebibytes, _ in pairs), statistics.median(files for _, files in pairs)


def unexpected_ends(records: SoakRecords) -> list[str]:
    """Ends of the server that no kill explains."""
    vital = [kill.at_s for kill in records.kills if kill.kind in VITAL]
    return [
        f"at {start.ended_s - records.began_s:.0f} s with {start.status}: {start.last}"
        for start in records.starts
        if not any(at_s <= start.ended_s <= at_s + DOWN_S for at_s in vital)
    ]


def tables(records: SoakRecords) -> tuple[list[list[list[str]]], list[str]]:
    """Rows of each table, and the musts that were missed."""
    lost = [stream for stream in records.streams if stream.lost]
    blamed = Counter(blame(stream, records.kills) for stream in lost)
    unreached = Counter(blame(stream, records.kills) for stream in records.streams if stream.outcome == "unreached")
    outcomes = Counter(stream.outcome for stream in records.streams)
    refusals = Counter(stream.detail[:3] for stream in records.streams if stream.outcome == "refused")
    false, ends = lies(records), unexpected_ends(records)
    backs = [kill.back_s for kill in records.kills if kill.back_s is not None]
    left = [start for start in records.starts if start.left]
    busy = sum(probe.speech == 429 for probe in records.probes)
    hostile_500 = [each for each in records.hostile if each[1].startswith("50") and each[1][:3] != "503"]
    minutes = (records.spans["end"][1] - records.began_s) / 60
    reached = len(records.streams) - outcomes["unreached"] + len(records.hostile)
    share = len(records.hostile) / max(1, reached)
    gaps = [stream.gap_s for stream in records.streams if stream.outcome == "whole"]
    rows = [
        ["what", "seen", "must"],
        ["minutes", f"{minutes:.1f}", ""],
        ["kills", f"{len(records.kills)}", f"{records.kills_wanted}"],
        ["starts of the server by its supervisor", f"{len(records.starts)}", ""],
        ["ends of the server that no kill explains", f"{len(ends)}", "0"],
        ["ends that left a process for over 10 s", f"{len(left)}", "0"],
        ["polite requests", f"{len(records.streams)}", ""],
        ["spoken as without kills (samples within 1)", f"{outcomes['whole']}", ""],
        ["longest silence in one of them, p50 / p99 / most", quantiles(gaps), ""],
        ["lost: their ingress or HAProxy was killed", f"{blamed['ingress or proxy']}", ""],
        ["lost: raylet, GCS, an agent, driver or command was killed", f"{blamed['server']}", ""],
        ["lost otherwise", f"{blamed['other']}", "0"],
        ["refused before audio, asked again: 429", f"{refusals['429']}", ""],
        ["refused before audio, asked again: 503", f"{outcomes['refused'] - refusals['429'] - refusals['401']}", ""],
        ["refused, asked again: key rotated meanwhile", f"{refusals['401']}", ""],
        ["not reached, asked again: a kill had just happened", f"{unreached.total() - unreached['other']}", ""],
        ["not reached, asked again: while the server started", f"{unreached['other']}", ""],
        ["hostile clients, share of all requests that came in", f"{len(records.hostile)}, {share:.1%}", "5 %"],
        ["hostile clients that got a 500", f"{len(hostile_500)}", "0"],
        ["key rotations", f"{records.rotations}", ""],
        ["revoked keys that worked, new ones that did not", f"{len(records.key_faults)}", "0"],
        ["from a death to speech, s: p50 / p99 / most", quantiles(backs), f"<= {BACK_S:.0f}"],
        ["`/ready` against speech: moments looked at", f"{len(records.probes)}", ""],
        ["of these, ready and too busy for one more (429)", f"{busy}", ""],
        ["moments at which it was wrong", f"{len(false)}", "0"],
        ["folders: this server's, and the logs of the latest that died", f"{records.folders[1]}", "<= 2"],
    ]
    growth, grown = memory(records)
    missed = [*grown]
    never = [kill for kill in records.kills if kill.back_s is None or kill.back_s > BACK_S]
    missed += [f"only {len(records.kills)} kills"] if len(records.kills) < records.kills_wanted else []
    missed += [f"server ended {end}" for end in ends]
    missed += [f"left for over 10 s: {', '.join(start.left)}" for start in left]
    missed += [f"lost: {stream}" for stream in lost if blame(stream, records.kills) == "other"]
    missed += [f"hostile {act}: {got}" for act, got in hostile_500]
    missed += [*records.key_faults, *(f"fault of the soak: {fault}" for fault in records.faults)]
    missed += [f"{records.folders[1]} folders of servers are left"] if records.folders[1] > 2 else []
    missed += [f"{kill.kind} killed at {kill.at_s - records.began_s:.0f} s: {kill.back_s}" for kill in never]
    missed += [f"/ready: {lie}" for lie in false]
    return [rows, deaths(records), growth], missed


def deaths(records: SoakRecords) -> list[list[str]]:
    """By kind of process: how often, how many streams were open, what was lost, when there was speech again."""
    rows = [["killed", "times", "streams open then", "lost", "speech after, s: p50", "most"]]
    for kind in dict.fromkeys((*KINDS, *VITAL)):
        kills = [kill for kill in records.kills if kill.kind == kind]
        lost = [stream for stream in records.streams if stream.lost and blame(stream, kills) != "other"]
        backs = [kill.back_s for kill in kills if kill.back_s is not None] or [float("nan")]
        times = f"{statistics.median(backs):.1f}", f"{max(backs):.1f}"
        rows.append([kind, f"{len(kills)}", f"{sum(kill.open_streams for kill in kills)}", f"{len(lost)}", *times])
    return rows


def memory(records: SoakRecords) -> tuple[list[list[str]], list[str]]:
    """By kind of process: MiB of its own and open files in each of the spans; and what has grown."""
    rows, grown = [["process", *(f"{name}: MiB, files" for name in records.spans)]], []
    for kind in (*KINDS, "serve command", "other", None):
        seen = [median_of(records.surveys, span, kind) for span in records.spans.values()]
        rows.append([kind or "all", *(f"{mebibytes:.0f}, {files:.0f}" for mebibytes, files in seen)])
    first, last = seen[0], seen[-1]  # of all
    for name, one, other in zip(("MiB", "open files"), first, last, strict=True):
        if other > FLAT * one:
            grown.append(f"{name} of all processes: {one:.0f} at the start, {other:.0f} at the end")
    return rows, grown


def quantiles(values: Sequence[float]) -> str:
    some = list(values) or [float("nan")]
    return f"{percentile(some, 0.5):.2f} / {percentile(some, 0.99):.2f} / {max(some):.2f}"


def as_text(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def as_markdown(rows: list[list[str]]) -> str:
    head, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *rest])

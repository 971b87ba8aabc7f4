"""Format the results of a listening session as a Markdown table."""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from talkray_tools.judge import Judged
from talkray_tools.spoken_texts import SENTENCES
from talkray_tools.ways import PLAIN

# Permitted increase of the error rate over ffmpeg's conversion. One error is always allowed, because recognisers vary.
MORE_ERRORS = 0.01


def rows(judged: Iterable[Judged]) -> dict[tuple[str, str, str], list[Judged]]:
    """Group utterances by table row, in order. Each kind of hard text has one row for all voices."""
    by_row: dict[tuple[str, str, str], list[Judged]] = {}
    for each in judged:
        is_hard = each.way == PLAIN.name and each.kind != SENTENCES
        by_row.setdefault((each.way, "all" if is_hard else each.voice, each.kind), []).append(each)
    return by_row


def rate(of: Sequence[Judged], name: str, *, compared: bool = False) -> float:
    """Return the share of wrong words."""
    return sum((each.compared if compared else each.errors)[name] for each in of) / sum(each.words for each in of)


def worse(judged: Iterable[Judged], name: str) -> list[str]:
    """Return the ways whose errors exceed the limit for a recogniser."""
    return [
        f"{way}: {100 * rate(of, name):.1f} % of the words are wrong, but {100 * rate(of, name, compared=True):.1f} % "
        "if ffmpeg converts plain PCM"
        for (way, _, _), of in rows(judged).items()
        if way != PLAIN.name and all(each.compared for each in of)
        if _is_worse([each.errors[name] - each.compared[name] for each in of], sum(each.words for each in of))
    ]


def not_come(judged: Iterable[Judged]) -> list[str]:
    """Return a line with the reason for each utterance without audio."""
    return [
        f"No audio: {each.way}, {each.voice}, {each.kind} {each.number}: {each.failed}"
        for each in judged
        if each.failed
    ]


def _is_worse(differences: Sequence[int], num_words: int) -> bool:
    """Return whether the difference exceeds two standard deviations of a random walk with the same steps."""
    by_chance = 2 * math.sqrt(sum(each * each for each in differences))
    return sum(differences) > max(1, MORE_ERRORS * num_words, by_chance)


def table(judged: Sequence[Judged], names: Sequence[str], about: str) -> str:
    """Build Markdown from `about`, the rows, and the failures. `names` lists the recognisers."""
    head = ["way", "voice", "kind", "utterances", "words"]
    head += [column for name in names for column in (name, "by ffmpeg")]
    head += ["first and last words right", "words/s", "DNSMOS"]
    lines = [about, "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(_row(key, of, names))} |" for key, of in rows(judged).items()]
    lines += [f"\n{line}" for line in not_come(judged)]
    return "\n".join(lines) + "\n"


def _row(key: tuple[str, str, str], of: list[Judged], names: Sequence[str]) -> Iterator[str]:
    words, came = sum(each.words for each in of), [each for each in of if not each.failed]
    yield from (*key, f"{len(of)}", f"{words}")
    for name in names:
        yield f"{100 * rate(of, name):.1f} %"
        yield f"{100 * rate(of, name, compared=True):.1f} %" if all(each.compared for each in of) else ""
    yield f"{100 * sum(each.ends for each in of) / (2 * len(of)):.0f} %"
    seconds = sum(each.seconds for each in came)
    yield f"{sum(each.words for each in came) / seconds:.2f}" if seconds else ""
    yield f"{np.mean([each.opinion for each in came]):.2f}" if came else ""

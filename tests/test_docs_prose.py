"""Pages and messages are written in plain English: short sentences, few numbers, and none of the phrases below."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.house import GENERATED

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "cluster/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Without texts to be spoken, and tables of requests.
OTHERS = [ROOT / "tools" / name for name in ("demo_voice", "experiments", "suites", "listening")]
CODE = [
    file
    for name in ("serve_app", "deployments", "loadtest", "tools")
    for file in sorted((ROOT / name).rglob("*.py"))
    if not any(file.is_relative_to(other) for other in OTHERS)
]
MOST_WORDS, MOST_NUMBERS, MOST_PAGE_WORDS, MOST_CHANGES_WORDS = 30, 5, 1200, 1500
_THING = "|".join((
    r"`[^`]+`", r"\b(?:files?|settings?|pages?|tables?|rows?|headers?|fields?|logs?|documents?|README|columns?)",
))  # fmt: skip
BANS = {
    "whoever, nobody, somebody": re.compile(r"\b(?:whoever|nobody|somebody)\b", re.IGNORECASE),
    "who without a noun": re.compile(r"(?:^Who|[;:] who|\b(?:for|of|to|says|tells?|knows?|than) who)\b(?![^.]*\?)"),
    "what as a subject": re.compile(r"^What (?!to\b)(?![^.]*\?)"),
    "is no X": re.compile(
        r"(?<!there )\b(?:is|are|was|were|be) no (?!longer\b|more\b|less\b|better\b|worse\b|different\b|need\b)\w", re.I
    ),
    "a thing that speaks or moves": re.compile(
        rf"(?:{_THING}) (?:says?|tells?|goes|go|comes?(?! from\b)|stands?(?! for\b))\b"
    ),
    "a thing that stands": re.compile(r"\b(?:stands?|lies?) (?:in|on|under|beside|behind|above|below|there|once)\b"),
}
_FENCE = re.compile(r"^( *)(```|~~~).*?^ *\2 *$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)")
_NUMBER = re.compile(r"(?<![\w.,:/-])[-+]?\d[\d.,:]*(?<![.,:])(?![\w-])")
_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)[)\"'*_]*\s+(?=[\"'(*_]*[A-Z`0-9])")


def blocks(page: str) -> Iterator[tuple[str, bool]]:
    """Paragraphs, items of lists and cells of tables without markup. Cells, which may be lists of words, are False."""
    text = re.sub(r"<!--.*?-->", "", _FENCE.sub("\n", GENERATED.sub("", page)), flags=re.DOTALL)
    text = re.sub(r"^#+ .*$", "", _LINK.sub(r"\1", text), flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\s*>)", text):
        lines = block.strip().splitlines()
        if lines and lines[0].lstrip().startswith("|"):
            yield from ((cell.strip(), False) for line in lines for cell in re.split(r"(?<!\\)\|", line))
        else:
            yield re.sub(r"^(?:[-*]|\d+\.) ", "", " ".join(line.lstrip(" >") for line in lines)), True


def sentences(text: str) -> list[str]:
    return [sentence.strip(" *_(") for sentence in _END.split(text) if sentence.strip()]


def banned(sentence: str) -> list[str]:
    return [f"{name}: {sentence}" for name, ban in BANS.items() if ban.search(sentence)]


def faults(page: str) -> list[str]:
    found = []
    for block, is_paragraph in blocks(page):
        for sentence in sentences(block):
            found += banned(sentence)
            num_words = len(re.sub(r"`[^`]*`", "code", sentence).split())
            if num_words > MOST_WORDS and (is_paragraph or sentence.endswith(".")):
                found.append(f"{num_words} words: {sentence}")
        numbers = _NUMBER.findall(re.sub(r"`[^`]*`", "", block))
        if is_paragraph and len(numbers) > MOST_NUMBERS:
            found.append(f"{len(numbers)} numbers: {block}")
    return found


def texts_of_code(tree: ast.AST) -> Iterator[str]:
    """Docstrings and all other texts of some words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 2:
            yield from (" ".join(part.split()) for part in node.value.split("\n\n"))


def unreleased(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.split(r"^## \[0", text, flags=re.MULTILINE)[0] if page.name == "CHANGELOG.md" else text


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_plain_and_short(page: Path) -> None:
    assert faults(unreleased(page)) == []
    most = MOST_CHANGES_WORDS if page.name == "CHANGELOG.md" else MOST_PAGE_WORDS
    assert len(GENERATED.sub("", unreleased(page)).split()) <= most


@pytest.mark.parametrize("folder", ["serve_app", "deployments", "loadtest", "tools"])
def test_texts_of_the_code_are_plain(folder: str) -> None:
    files = [file for file in CODE if file.is_relative_to(ROOT / folder)]
    texts = {(file, text) for file in files for text in texts_of_code(ast.parse(file.read_text(encoding="utf-8")))}
    parts = [(file, part) for file, text in texts for part in sentences(text)]
    found = [f"{file.relative_to(ROOT)}: {fault}" for file, part in parts for fault in banned(part)]
    assert len(texts) > 100
    assert sorted(found) == []


@pytest.mark.parametrize(("fault", "text"), [
    ("whoever", "For whoever has much to speak."), ("whoever", "A stream that nobody reads ends."),
    ("whoever", "200: somebody can speak."), ("who without", "Counts tell who used how much."),
    ("who without", "The record of one request: who asked."), ("who without", "Who holds it must release it."),
    ("what as", "What a checkpoint needs of a recording."), ("is no X", "The container's UID is no user."),
    ("is no X", "Such marks are no markup."), ("is no X", "A click was no speech."),
    ("speaks", "The file says which one it is."), ("speaks", "`seed` tells them apart."),
    ("speaks", "The setting stands alone."), ("speaks", "All headers go first."),
    ("thing that stands", "Budgets stand in one file."), ("thing that stands", "It lies in a bucket."),
    ("31 words", f"One {'word ' * 29}end."), ("31 words", f"- One item.\n- {'word ' * 31}"),
    ("31 words", f"| a | b |\n|---|---|\n| {'word ' * 30}end. | x |"),
    ("6 numbers", "It takes 1, 2, 3.5, 4 %, 5 ms or 1,000 s."),
])  # fmt: skip
def test_a_fault_is_found(fault: str, text: str) -> None:
    assert [fault in found for found in faults(text)] == [True]


@pytest.mark.parametrize("text", [
    "Who can call it? Clients who have a key.", "What to do when a replica fails.", "See what happens.",
    "There is no default. It is no longer supported.", "SSE stands for server-sent events.",
    "The value comes from `config`.", "The command tells you the reason.", "Use `x` if the key is not known.",
    f"One {'word ' * 28}end. Another {'word ' * 28}end.", f"Set `{'word ' * 31}` here.",
    f"A list: {'word ' * 20}\n\n- {'word ' * 20}\n- {'word ' * 20}",
    f"| {'word ' * 40}| x |", f"```text\n{'word ' * 40}\n```",
    "Runs on H100, A100 and L40S with Python3, mp3 and [`1 2 3 4 5 6`](a.md).",
    "<!-- Generated by python -m tools.reference: x -->\nWhat nobody says.\n<!-- End of it -->",
])  # fmt: skip
def test_plain_english_is_accepted(text: str) -> None:
    assert faults(text) == []

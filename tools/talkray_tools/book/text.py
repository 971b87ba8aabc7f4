"""A book as it is read aloud: chapters of paragraphs. And how plain text and Markdown are read as one."""

# ruff: noqa: RUF001 (characters that look like others begin chapters)

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from deployments.errors import InvalidRequest
from serve_app.text.characters import is_ideograph, is_speakable
from serve_app.text.splitting import split_text

Kind = Literal["heading", "text", "break"]

MAX_FILE_BYTES = 64 << 20  # of a text
_MOST_PART_CHARS = 2000  # of one text that is sent
_MARK = re.compile(r"^\[([^\W\d][^\[\]\n]{0,40})\]:(?!\s*(?:https?://|<|/|#))[ \t]*", re.M)
_HEADING = re.compile(r"^(#{1,6})[ \t]+(.*?)[ \t]*#*$")
_FENCE = re.compile(r"^[ \t]*(```+|~~~+).*?^[ \t]*\1[`~]*[ \t]*$", re.M | re.S)
_COMMENT = re.compile(r"<!--.*?-->", re.S)
_FRONT_MATTER = re.compile(r"\A---\n(.*?\n)---\n", re.S)
_NOTE = re.compile(r"^\[\^[^\]]+\]:.*(?:\n(?:[ \t]+\S.*|[ \t]*$))*", re.M)
_RULE = re.compile(r"^[ \t]*(?:(?:[*_-][ \t]*){3,}|[ \t]*[⁂※][ \t]*)$")
_CHAPTERS = "chapter|kapitel|chapitre|cap[ií]tulo|capitolo|глава"
_PARTS = "part|book|teil|buch|partie|livre|parte|libro|часть"
_ALONE = "prologue|epilogue|preface|foreword|introduction|afterword|prolog|epilog|vorwort|nachwort|préface|épilogue"
_NUMBER = (
    r"(?:\d{1,4}|[ivxlcdm]{1,7}|(?:the[ \t]+)?(?:one|two|three|four|five|six|seven|eight|nine|ten|first|second|third))"
)
_REST = r"[ \t]*(?:[.:–—-][ \t]*[\w.,:'’ –—-]{0,70})?"
_TITLE = re.compile(
    rf"(?:{_CHAPTERS}|{_PARTS})[ \t]+{_NUMBER}{_REST}|(?:{_CHAPTERS})[ \t]+[\w:'’ –—-]{{1,70}}|(?:{_ALONE})[.:]?"
    r"|第[ \t]*[\d〇零一二三四五六七八九十百千两]{1,6}[ \t]*[章回节卷部篇].{0,40}",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A text that is spoken without a pause of the book's. A break is a pause without text."""

    text: str
    kind: Kind = "text"
    speaker: str = ""  # named by a mark; empty: the narrator


@dataclass(slots=True)
class Chapter:
    """Paragraphs behind a mark of the file."""

    title: str
    paragraphs: list[Paragraph] = field(default_factory=list)


@dataclass(slots=True)
class Book:
    """What a file says, and what of it is not read aloud: a line and a count each."""

    title: str
    author: str = ""
    language: str = ""
    date: str = ""
    publisher: str = ""
    cover: bytes | None = None  # JPEG or PNG
    markup: Literal["none", "auto"] = "none"  # of the paragraphs
    chapters: list[Chapter] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def speakers(self) -> list[str]:
        """That marks name, in their order."""
        return list(dict.fromkeys(each.speaker for _, each in self.spoken() if each.speaker))

    def spoken(self) -> Iterator[tuple[int, Paragraph]]:
        """Paragraphs with text, and the number of their chapter."""
        for number, chapter in enumerate(self.chapters):
            yield from ((number, each) for each in chapter.paragraphs if each.kind != "break")


def paragraphs_of(text: str, kind: Kind = "text") -> list[Paragraph]:
    """The turns of a text: `[Name]:` at the start of a line begins one of that speaker. Long ones are cut between
    sentences; what has nothing to speak is left out.
    """
    pieces = _MARK.split(text)
    turns = [("", pieces[0]), *zip(pieces[1::2], pieces[2::2], strict=True)]
    return [
        Paragraph(part, kind, speaker.strip())
        for speaker, turn in turns
        for part in split_text(turn.strip(), _MOST_PART_CHARS)
        if is_speakable(part)
    ]


def read_text(file: Path) -> str:
    """UTF-8, or UTF-16 with its mark. Raises InvalidRequest."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise InvalidRequest(f"{file} has more than {MAX_FILE_BYTES >> 20} MiB: it is no text of a book", "file")
        return decoded(file.read_bytes(), str(file))
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}", "file") from None


def decoded(content: bytes, name: str) -> str:
    """Raises InvalidRequest that says where the text is not in its encoding."""
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name}: byte {error.start} is no {encoding}: save it as UTF-8", "file") from None
    if "\0" in text:
        raise InvalidRequest(f"{name} is no text: it has zero bytes", "file")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def plain_book(text: str, title: str) -> Book:
    """Blank lines part paragraphs; in a text without any, each line is one. A line of its own such as "Chapter 3" or
    "第三章" begins a chapter.
    """
    book = Book(title)
    has_blanks = re.search(r"\n[ \t]*\n", text.strip()) is not None
    for block in re.split(r"\n[ \t]*\n\s*" if has_blanks else r"\n", text.strip()):
        stripped = block.strip()
        if _TITLE.fullmatch(stripped):
            book.chapters.append(Chapter(stripped, paragraphs_of(stripped, "heading")))
        elif _RULE.match(stripped):
            _chapter(book).paragraphs.append(Paragraph("", "break"))
        else:
            _chapter(book).paragraphs += paragraphs_of(_unwrapped(stripped))
    return _checked(book)


def markdown_book(text: str, title: str, depth: int) -> Book:
    """Headings of up to `depth` levels begin chapters; one heading of the first level in front of all is the title, and
    levels count below it. The server leaves out marks, code and link targets; notes and fenced code are left out here.
    """
    book = Book(title, markup="auto")
    if (front := _FRONT_MATTER.match(text)) is not None:
        text = text[front.end() :]
        _read_front_matter(book, front[1])
    for pattern, name in ((_COMMENT, "comments"), (_FENCE, "code blocks"), (_NOTE, "notes")):
        text, count = pattern.subn("", text)
        book.left_out += Counter({name: count} if count else {})
    blocks = [block for block in re.split(r"\n[ \t]*\n|(?m:(?=^#{1,6}[ \t]))", text) if block.strip()]
    levels = [len(found[1]) for block in blocks if (found := _HEADING.match(block.strip().split("\n")[0]))]
    is_titled = bool(levels) and levels.count(1) == 1 and levels[0] == 1 and len(levels) > 1
    for block in blocks:
        head, _, rest = block.strip().partition("\n")
        if (found := _HEADING.match(head)) is None:
            _add_markdown(book, block.strip())
            continue
        level = len(found[1]) - is_titled
        if level == 0:
            book.title = found[2]
            _chapter(book).paragraphs += paragraphs_of(found[2], "heading")
        elif level <= depth:
            book.chapters.append(Chapter(found[2], paragraphs_of(found[2], "heading")))
        else:
            _chapter(book).paragraphs += paragraphs_of(found[2], "heading")
        if rest.strip():
            _add_markdown(book, rest.strip())
    return _checked(book)


def _add_markdown(book: Book, block: str) -> None:
    if _RULE.match(block):
        _chapter(book).paragraphs.append(Paragraph("", "break"))
    else:
        _chapter(book).paragraphs += paragraphs_of(block)


def _read_front_matter(book: Book, content: str) -> None:
    try:
        found = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise InvalidRequest(f"the front matter between the --- lines is no YAML: {error}", "file") from None
    if isinstance(found, dict):
        book.title = str(found.get("title") or book.title)
        book.author = str(found.get("author") or "")
        book.language = str(found.get("lang") or found.get("language") or "")
        book.date = str(found.get("date") or "")


def _chapter(book: Book) -> Chapter:
    """The last one; what comes before the first heading is a chapter with the book's title."""
    if not book.chapters:
        book.chapters.append(Chapter(book.title))
    return book.chapters[-1]


def _unwrapped(block: str) -> str:
    """Lines of a paragraph that was wrapped; a speaker's mark keeps its line."""
    text = ""
    for line in (each.strip() for each in block.split("\n")):
        is_joined = bool(text) and is_ideograph(text[-1]) and is_ideograph(line[:1] or " ")
        text += ("\n" if _MARK.match(line) else "" if is_joined or not text else " ") + line
    return text


def _checked(book: Book) -> Book:
    book.chapters = merged(book.chapters)
    if not any(True for _ in book.spoken()):
        raise InvalidRequest("the file has no text to speak", "file")
    return book


def merged(chapters: Iterable[Chapter]) -> list[Chapter]:
    """Without chapters that have nothing to say. One that has a heading only is kept: "Part One"."""
    return [each for each in chapters if any(paragraph.kind != "break" for paragraph in each.paragraphs)]

"""Books to read aloud, as chapters made up of paragraphs, with readers for plain text and Markdown."""

# ruff: noqa: RUF001 (chapter patterns contain characters that look like ASCII)

import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml
from num2words import num2words

from deployments.embedded_voice.english import roman_value
from deployments.errors import InvalidRequest
from serve_app.text.characters import is_ideograph, is_speakable
from serve_app.text.splitting import split_text

Kind = Literal["heading", "text", "break"]

MAX_FILE_BYTES = 64 << 20  # per text file
_MOST_PART_CHARS = 2000  # per text sent to the server
_MARK = re.compile(r"^\[([^\W\d][^\[\]\n]{0,40})\]:(?!\s*(?:https?://|<|/|#))[ \t]*", re.M)
_HEADING = re.compile(r"^(#{1,6})[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*$")
_UNDERLINE = re.compile(r"^ {0,3}(=+|-+)[ \t]*$")
_NO_HEADING = re.compile(
    r"^(?:[ \t]*(?:[-*+>|#]|\d+[.)])(?:[ \t]|$)|[ \t]*[>|]| {4}|\t)"
)  # start of a list item, a quotation, a table or code
_MOST_WRAPPED_TITLE = 100  # longest wrapped title above ---, in characters; below longer text, --- is a break
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
_CHINESE = r"第[ \t]*[\d〇零一二三四五六七八九十百千两]{1,6}[ \t]*[章回节卷部篇]"
_TITLE = re.compile(
    rf"(?:{_CHAPTERS}|{_PARTS})[ \t]+{_NUMBER}{_REST}|(?:{_CHAPTERS})[ \t]+[\w:'’ –—-]{{1,70}}|(?:{_ALONE})[.:]?"
    rf"|{_CHINESE}.{{0,40}}",
    re.I,
)
_UNTITLED = re.compile(rf"(?:{_CHAPTERS}|{_PARTS})[ \t]+(?:{_NUMBER}|[\w-]{{3,15}})[ \t]*[.:]?|{_CHINESE}", re.I)
_OF_CHAPTER = re.compile(rf"(?:{_CHAPTERS})\b|第", re.I)
_NUMERAL = re.compile(
    r"[-–—*_ \t]*\b([ivxlcdm]{1,8}|[\d]{1,4}|[a-z]+(?:[- ][a-z]+)?|[一二三四五六七八九十]{1,3})\b[.:)]?[-–—*_ \t]*",
    re.I,
)
_ROMAN = re.compile(r"(?=.)m{0,3}(?:cm|cd|d?c{0,3})(?:xc|xl|l?x{0,3})(?:ix|iv|v?i{0,3})", re.I)
_IN_WORDS = {num2words(number): number for number in range(1, 100)}
_TENS = ("", *(f"{digit}十".removeprefix("一") for digit in "一二三四五六七八九"))
_IN_CHINESE = {
    ten + one: 10 * a + b for a, ten in enumerate(_TENS) for b, one in enumerate(["", *"一二三四五六七八九"])
}
_MOST_TITLE_CHARS = 70
_SENTENCE_END = (".", "!", "?", "…", ",", ";", ":", '"', "”", "»", "'", "’", "。", "！", "？", "，", "：", "」")
LICENCE = "licence of Project Gutenberg"
_LICENCE_END = re.compile(r"\W*(?:START OF (?:THE |THIS )?PROJECT GUTENBERG|END\W+THE SMALL PRINT)", re.I)
_LICENCE_START = re.compile(r"\W*END OF (?:THE |THIS )?PROJECT GUTENBERG", re.I)
_FOREIGN_RUN = re.compile(r"[^\W\d_a-zA-Z]{3,}")
_MOST_FOREIGN, _MOST_IN_RUNS = 0.4, 0.1  # maximum shares of non-ASCII letters in windows-1252 text


@dataclass(frozen=True, slots=True)
class Cue:
    """One subtitle's text and times. The name identifies the cue in the file."""

    name: str
    text: str
    start_s: float
    end_s: float

    @property
    def is_empty(self) -> bool:
        return self.end_s <= self.start_s


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Text spoken without a pause. A break is a pause with no text."""

    text: str
    kind: Kind = "text"
    speaker: str = ""  # from a `[Name]:` mark; empty for the narrator
    cue: Cue | None = None  # the cue whose times the paragraph must keep


@dataclass(slots=True)
class Chapter:
    """One chapter: the paragraphs after a chapter mark in the file."""

    title: str
    paragraphs: list[Paragraph] = field(default_factory=list)


@dataclass(slots=True)
class Book:
    """A file's text, with counts of the parts that are not read aloud."""

    title: str
    author: str = ""
    language: str = ""
    date: str = ""
    publisher: str = ""
    cover: bytes | None = None  # JPEG or PNG
    markup: Literal["none", "auto"] = "none"  # applies to the paragraphs
    chapters: list[Chapter] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)  # warnings about how the file was read

    @property
    def is_timed(self) -> bool:
        """Whether the paragraphs must keep cue times."""
        return any(each.cue is not None for _, each in self.spoken())

    def speakers(self) -> list[str]:
        """Speakers named by marks, in order of first appearance."""
        return list(dict.fromkeys(each.speaker for _, each in self.spoken() if each.speaker))

    def spoken(self) -> Iterator[tuple[int, Paragraph]]:
        """Yield the paragraphs that have text, each with its chapter's index."""
        for number, chapter in enumerate(self.chapters):
            yield from ((number, each) for each in chapter.paragraphs if each.kind != "break")


def paragraphs_of(text: str, kind: Kind = "text") -> list[Paragraph]:
    """Split a text into turns; `[Name]:` at the start of a line begins a turn of that speaker. Long turns are cut
    between sentences. Turns with nothing to speak are left out.
    """
    pieces = _MARK.split(text)
    turns = [("", pieces[0]), *zip(pieces[1::2], pieces[2::2], strict=True)]
    return [
        Paragraph(part, kind, speaker.strip())
        for speaker, turn in turns
        for part in split_text(turn.strip(), _MOST_PART_CHARS)
        if is_speakable(part)
    ]


def read_text(file: Path, remarks: list[str]) -> str:
    """Decode UTF-8, UTF-16 with a byte order mark, or windows-1252 with a remark. Raises `InvalidRequest`."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise InvalidRequest(f"{file} is larger than {MAX_FILE_BYTES >> 20} MiB, the limit for a text file", "file")
        content = file.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}", "file") from None
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding == "utf-16" or not _is_western(content):
            place = f"{file}: byte {error.start} is not {encoding.removesuffix('-sig').upper()}"
            raise InvalidRequest(f"{place}, and the file is not windows-1252 text. Save it as UTF-8", "file") from None
        text = content.decode("cp1252")
        remarks.append(f"{file.name} is not UTF-8 and was read as windows-1252. Save it as UTF-8 if letters are wrong")
    if "\0" in text:
        raise InvalidRequest(f"{file} is not a text file: it contains zero bytes", "file")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _is_western(content: bytes) -> bool:
    """Return whether the bytes may be windows-1252: mostly ASCII letters, no control characters, no damaged UTF-8."""
    try:
        text = content.decode("cp1252")
    except UnicodeDecodeError:
        return False
    letters = [char for char in text if char.isalpha()]
    num_foreign = sum(not char.isascii() for char in letters)
    num_in_runs = sum(map(len, _FOREIGN_RUN.findall(text)))  # rare in western languages
    is_foreign = num_in_runs > _MOST_IN_RUNS * len(letters) or num_foreign > max(_MOST_FOREIGN * len(letters), 9)
    as_utf8 = [char for char in content.decode("utf-8", "replace") if not char.isascii()]
    is_utf8 = 2 * as_utf8.count("\ufffd") < len(as_utf8)
    return not (is_foreign or is_utf8 or re.search(r"[\x00-\x08\x0e-\x1f]", text))


def plain_book(text: str, title: str) -> Book:
    """Read plain text. Blank lines separate paragraphs; in a text without blank lines, each line is a paragraph.

    Chapters begin at lines such as "Chapter 3", "第三章" or "# Three", or at consecutive numerals. A title may follow.
    """
    book = Book(title)
    has_blanks = re.search(r"\n[ \t]*\n", text.strip()) is not None
    blocks = re.split(r"\n[ \t]*\n\s*" if has_blanks else r"\n", text.strip())
    marks = deque(_chapter_marks([block.strip() for block in blocks]))
    while marks:
        mark = marks.popleft()
        text = mark.rest
        if mark.line:
            is_next = (
                not text
                and len(marks) > 1
                and not (marks[0].line or marks[1].line or (not has_blanks and marks[1].rest[:1].islower()))
            )
            below = marks[0].rest if is_next else text
            if not (mark.is_untitled and _is_title(below)):
                below = ""
            elif is_next:
                marks.popleft()
            book.chapters.append(
                Chapter(_titled(mark.line, below), paragraphs_of(_titled(mark.said, below), "heading"))
            )
            text = "" if below else text
        if _RULE.match(text):
            _chapter(book).paragraphs.append(Paragraph("", "break"))
        else:
            _chapter(book).paragraphs += paragraphs_of(unwrapped(text))
    return finished(book)


@dataclass(frozen=True, slots=True)
class _Mark:
    """One block of plain text: its chapter heading, if any, the spoken heading, and the remaining text."""

    line: str = ""
    rest: str = ""
    is_untitled: bool = False  # whether the title may be on the next line
    said: str = ""


def _chapter_marks(blocks: Sequence[str]) -> list[_Mark]:
    marks = [_mark(block) for block in blocks]
    if not any(_OF_CHAPTER.match(mark.line) for mark in marks):
        for number, said in _numerals(blocks).items():
            line, _, rest = blocks[number].partition("\n")
            marks[number] = marks[number] if marks[number].line else _Mark(line.strip(), rest.strip(), True, said)
    return marks


def _mark(block: str) -> _Mark:
    head, _, rest = block.partition("\n")
    head = head.strip()
    if _TITLE.fullmatch(block):
        return _Mark(block, "", _UNTITLED.fullmatch(block) is not None, block)
    if rest and _UNTITLED.fullmatch(head) and _TITLE.fullmatch(head):
        return _Mark(head, rest, True, head)
    if not rest and (found := _HEADING.match(head)):
        return _Mark(found[2], "", False, found[2])
    if _UNDERLINE.match(rest) and is_speakable(head) and not _NO_HEADING.match(head):
        return _Mark(head, "", False, head)
    return _Mark("", block)


def _numerals(blocks: Sequence[str]) -> dict[int, str]:
    """Return the blocks that begin with a consecutive numeral on its own line, with the numeral's spoken form. Numerals
    are page numbers, and the result is empty, if text continues in lower case after one of them.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for number, block in enumerate(blocks):
        head, _, rest = block.partition("\n")
        if numeral := _numeral(head):
            kind, value = numeral
            behind = rest or "".join(blocks[number + 1 : number + 2])
            before = blocks[number - 1] if number else "."
            if behind[:1].islower() and not (before.endswith(_SENTENCE_END) or _TITLE.fullmatch(before)):
                return {}
            found.setdefault(kind, []).append((number, value))
    return {
        number: blocks[number].partition("\n")[0] if kind == "words" else str(value)
        for kind, each in found.items()
        for at, (number, value) in enumerate(each)
        if value - 1 in (other for _, other in each[max(0, at - 1) : at])
        or value + 1 in (other for _, other in each[at + 1 : at + 2])
    }


def _numeral(line: str) -> tuple[str, int] | None:
    """Return the notation and value of the number on a line."""
    if (found := _NUMERAL.fullmatch(line.strip())) is None:
        return None
    text = found[1].lower()
    if text.isascii() and text.isdigit():
        return "digits", int(text)
    if _ROMAN.fullmatch(text):
        return "Roman", roman_value(text.upper())
    if line.strip().endswith("."):  # a number with a full stop is a sentence
        return None
    value = _IN_WORDS.get(text.replace(" ", "-")) or _IN_CHINESE.get(text)
    return None if value is None else ("words", value)


def _is_title(line: str) -> bool:
    """Return whether a line below a chapter number is its title: short and, unless in capitals, not a sentence."""
    line = line.strip()
    if (
        not line
        or "\n" in line
        or len(line) > _MOST_TITLE_CHARS
        or _MARK.match(line)
        or not line[0].isalnum()
        or _numeral(line)
    ):
        return False
    words = [word for word in line.split() if len(word) > 3 or word == line.split()[0]]
    is_capital = line.isupper() or (len(line.split()) > 1 and all(not word[0].islower() for word in words))
    return not line.endswith(_SENTENCE_END) or (is_capital and line.endswith((".", "!", "?")))


def _titled(line: str, below: str) -> str:
    return f"{line}{' ' if line.endswith(('.', ':', ')')) else ': '}{below}" if below else line


def markdown_book(text: str, title: str, depth: int) -> Book:
    """Read Markdown without notes and fenced code. Headings of up to `depth` levels begin chapters.

    A single first-level heading at the beginning is the title. The server removes markup and link targets.
    """
    book = Book(title, markup="auto")
    if (front := _FRONT_MATTER.match(text)) is not None:
        text = text[front.end() :]
        _read_front_matter(book, front[1])
    for pattern, name in ((_COMMENT, "comments"), (_FENCE, "code blocks"), (_NOTE, "notes")):
        text, count = pattern.subn("", text)
        book.left_out += Counter({name: count} if count else {})
    text = "\n\n".join(map(_with_marks, re.split(r"\n[ \t]*\n", text)))
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
    return finished(book)


def _with_marks(block: str) -> str:
    """Convert headings underlined with = or - to `#` headings. Longer text above --- ends with a break."""
    lines, done = block.strip("\n").split("\n"), 0  # number of leading lines that are not part of a heading
    for number, line in enumerate(lines):
        if _HEADING.match(line):
            done = number + 1
        if number <= done or not (found := _UNDERLINE.match(line)):
            continue
        title = " ".join(each.strip() for each in lines[done:number] if each)
        if _NO_HEADING.match(lines[done]) or (
            found[1][0] == "-" and number > done + 1 and len(title) > _MOST_WRAPPED_TITLE
        ):
            lines[number] = f"\n{line}\n" if len(found[1]) > 2 and found[1][0] == "-" else line
        else:
            lines[done : number + 1] = [*[""] * (number - done), f"{'#' if found[1][0] == '=' else '##'} {title}\n"]
        done = number + 1
    return "\n".join(lines)


def _add_markdown(book: Book, block: str) -> None:
    if _RULE.match(block):
        _chapter(book).paragraphs.append(Paragraph("", "break"))
    else:
        _chapter(book).paragraphs += paragraphs_of(block)


def _read_front_matter(book: Book, content: str) -> None:
    try:
        found = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise InvalidRequest(f"the front matter between the --- lines is not YAML: {error}", "file") from None
    if isinstance(found, dict):
        book.title = str(found.get("title") or book.title)
        book.author = str(found.get("author") or "")
        book.language = str(found.get("lang") or found.get("language") or "")
        book.date = str(found.get("date") or "")


def _chapter(book: Book) -> Chapter:
    """Return the last chapter. Text before the first heading becomes a chapter named after the book."""
    if not book.chapters:
        book.chapters.append(Chapter(book.title))
    return book.chapters[-1]


def unwrapped(block: str) -> str:
    """Join the lines of a wrapped paragraph. Lines with a speaker mark stay separate."""
    text = ""
    for line in (each.strip() for each in block.split("\n")):
        is_joined = bool(text) and is_ideograph(text[-1]) and is_ideograph(line[:1] or " ")
        text += ("\n" if _MARK.match(line) else "" if is_joined or not text else " ") + line
    return text


def finished(book: Book) -> Book:
    """Remove Project Gutenberg's licence and empty chapters, except for headings such as "Part One". Raises
    `InvalidRequest` if the book has no text.
    """
    texts = [paragraph.text for chapter in book.chapters for paragraph in chapter.paragraphs]
    begin = max((number + 1 for number, text in enumerate(texts) if _LICENCE_END.match(text)), default=0)
    ends = (number for number, text in enumerate(texts) if number >= begin and _LICENCE_START.match(text))
    end, at = next(ends, len(texts)), 0
    book.left_out += Counter({LICENCE: (begin > 0) + (end < len(texts))})
    for chapter in book.chapters:
        at, before = at + len(chapter.paragraphs), at
        chapter.paragraphs = chapter.paragraphs[max(0, begin - before) : max(0, end - before)]
    book.chapters = [each for each in book.chapters if any(part.kind != "break" for part in each.paragraphs)]
    if not any(True for _ in book.spoken()):
        raise InvalidRequest("the file has no text to speak", "file")
    return book

"""Plain text and Markdown as books, and the marks of speakers."""

from pathlib import Path

import pytest

from deployments.errors import InvalidRequest
from talkray_tools.book.text import Book, Paragraph, markdown_book, paragraphs_of, plain_book, read_text


def shape(book: Book) -> list[tuple[str, list[str]]]:
    return [(chapter.title, [each.text for each in chapter.paragraphs]) for chapter in book.chapters]


def test_plain_text() -> None:
    text = "A note first.\n\nChapter 1\n\nIt was a\ndark night.\n\n* * *\n\nPart of it was dry.\n\n\nEpilogue\n\nEnd.\n"
    assert shape(plain_book(text, "Night")) == [
        ("Night", ["A note first."]),
        ("Chapter 1", ["Chapter 1", "It was a dark night.", "", "Part of it was dry."]),
        ("Epilogue", ["Epilogue", "End."]),
    ]


def test_chinese_text_has_chapters_and_no_spaces_at_its_wraps() -> None:
    text = "第一章 开始\n\n很长的\n一行。\n\n第12回\n\n[小明]: 你好!"
    book = plain_book(text, "书")
    assert shape(book) == [("第一章 开始", ["第一章 开始", "很长的一行。"]), ("第12回", ["第12回", "你好!"])]
    assert book.speakers() == ["小明"]


CHAPTERS = "Chapter 1", "CHAPTER IV. THE STORM", "Chapter One: Rain", "Part Two", "Kapitel eins", "Prologue", "第三章"
NO_CHAPTERS = "Part of it was dry.", "Book it now", "Chapter one was long, he said.", "Introduction to it"


@pytest.mark.parametrize(
    ("text", "chapters"),
    [
        ("A note.\n\nI\n\nA.\n\nII.\n\nB.", [("T", "A note."), ("I", "1", "A."), ("II.", "2", "B.")]),
        ("- 1 -\n\nA.\n\n2)\n\nB.", [("- 1 -", "1", "A."), ("2)", "2", "B.")]),
        ("XIX\n\nA.\n\nxx\n\nB.", [("XIX", "19", "A."), ("xx", "20", "B.")]),
        ("TWENTY\n\na.\n\nTwenty-One\n\nb.", [("TWENTY", "TWENTY", "a."), ("Twenty-One", "Twenty-One", "b.")]),
        ("九\n\n甲。\n\n十\n\n乙。", [("九", "九", "甲。"), ("十", "十", "乙。")]),
        ("1\nA.\n2\nB.", [("1", "1", "A."), ("2", "2", "B.")]),
        (
            "Part One\n\nI\n\nRain\n\na.\n\nII\n\nSnow\n\nb.",
            [("Part One", "Part One"), ("I: Rain", "1: Rain", "a."), ("II: Snow", "2: Snow", "b.")],
        ),
        ("I\n\nalone.", [("T", "I", "alone.")]),
        ("1914\n\nA year.\n\n1939\n\nAnother.", [("T", "1914", "A year.", "1939", "Another.")]),
        (
            "It began in\n\n12\n\nthe year and\n\n13\n\nwent on.",
            [("T", "It began in", "12", "the year and", "13", "went on.")],
        ),
        ("Chapter 1\n\na.\n\nI\n\nb.\n\nII\n\nc.", [("Chapter 1", "Chapter 1", "a.", "I", "b.", "II", "c.")]),
        ("CHAPTER I.\nDown the Rabbit-Hole\n\nA.", [("CHAPTER I. Down the Rabbit-Hole",) * 2 + ("A.",)]),
        ("CHAPTER II.\n\nTHE POOL OF TEARS.\n\nB.", [("CHAPTER II. THE POOL OF TEARS.",) * 2 + ("B.",)]),
        ("Chapter 3\n\nThe End\n\nIt was.", [("Chapter 3: The End", "Chapter 3: The End", "It was.")]),
        ("Chapter 4\n\nYes.\n\nNo.", [("Chapter 4", "Chapter 4", "Yes.", "No.")]),
        ("Chapter 5\nIt was dark and\nwet.\n\nb.", [("Chapter 5", "Chapter 5", "It was dark and wet.", "b.")]),
        ("Chapter 6: Rain\n\nThe Sun\n\nx.", [("Chapter 6: Rain", "Chapter 6: Rain", "The Sun", "x.")]),
        ("第一章\n\n开始\n\n很长。", [("第一章: 开始", "第一章: 开始", "很长。")]),
        ("# A\n\na.\n\nB\n===\n\nb.\n\nC\n---\n\nc.", [("A", "A", "a."), ("B", "B", "b."), ("C", "C", "c.")]),
        ("One.\nTwo.", [("T", "One.", "Two.")]),  # without blank lines each line is a paragraph
        *((f"x.\n\n{line}\n\ny.", [("T", "x.", line, "y.")]) for line in NO_CHAPTERS),
        *((f"x.\n\n{line}\n\ny.", [("T", "x."), (line, line, "y.")]) for line in CHAPTERS),
    ],
)  # fmt: skip
def test_headings_and_numerals_begin_chapters(text: str, chapters: list[tuple[str, ...]]) -> None:
    assert [(title, *texts) for title, texts in shape(plain_book(text, "T"))] == chapters


def test_speakers() -> None:
    text = "He came.\n[Ann]: Who is it?\nAnd why?\n[Mr. Bob]:   Me. [1]: no mark\n[^1]: none\n[x]: https://example.org"
    assert paragraphs_of(text) == [
        Paragraph("He came."),
        Paragraph("Who is it?\nAnd why?", speaker="Ann"),
        Paragraph("Me. [1]: no mark\n[^1]: none\n[x]: https://example.org", speaker="Mr. Bob"),
    ]


def test_long_paragraphs_are_cut_between_sentences() -> None:
    sentence = "This is a sentence of some length. "
    parts = paragraphs_of(sentence * 200)
    assert len(parts) == 4
    assert all(each.text.endswith(".") for each in parts)
    assert " ".join(each.text for each in parts) == (sentence * 200).strip()


MARKDOWN = """---
title: Front
author: Ann
---
# The Title
Intro.

## One

[Ann]: Hi *there*.

```
code

# no heading
```

### Below
More[^1]. <!-- hidden -->

[^1]: A note
    that goes on.

---

## Two ##
Bye.
"""


def test_markdown() -> None:
    book = markdown_book(MARKDOWN, "file", 1)
    assert (book.title, book.author, book.markup) == ("The Title", "Ann", "auto")
    assert shape(book) == [
        ("The Title", ["The Title", "Intro."]),
        ("One", ["One", "Hi *there*.", "Below", "More[^1].", ""]),
        ("Two", ["Two", "Bye."]),
    ]
    assert book.left_out == {"comments": 1, "code blocks": 1, "notes": 1}
    assert [title for title, _ in shape(markdown_book(MARKDOWN, "file", 2))] == ["The Title", "One", "Below", "Two"]
    assert shape(markdown_book("# A\nx.\n# B\ny.", "f", 1)) == [("A", ["A", "x."]), ("B", ["B", "y."])]


@pytest.mark.parametrize(("text", "titles"), [
    ("# One\n\nx.\n\nSetext Two\n==========\n\ny.", ["One", "Setext Two"]),
    ("One\n===\nx.\n\nTwo\n---\ny.", ["One", "Two"]),
    ("A title of\ntwo lines\n===\nx.\n\nTwo lines\nof it\n-----\ny.", ["A title of two lines", "Two lines of it"]),
    ("## One\nText.\n\n---\n\nMore.", ["One"]),
    ("# A\n- item\n---\n> quoted\n---\n\n| a |\n|---|\n\n    code\n    ---", ["A"]),
    (f"# A\n{'A wrapped paragraph, ' * 3}\n{'that ends with a break. ' * 3}\n---\nx.", ["A"]),
    ("# I\nx.\n# II\ny.\n# C# #\nz.", ["I", "II", "C#"]), ("```\nnone\n===\n```\n# A\nx.", ["A"]),
])  # fmt: skip
def test_underlined_headings(text: str, titles: list[str]) -> None:
    book = markdown_book(text, "T", 2)
    assert [title for title, _ in shape(book)] == titles
    assert "==" not in "".join(paragraph.text for _, paragraph in book.spoken())


START, END = "*** START OF THE PROJECT GUTENBERG EBOOK A ***", "*** END OF THE PROJECT GUTENBERG EBOOK A ***"


@pytest.mark.parametrize(("text", "spoken", "count"), [
    (f"The Project Gutenberg eBook\n\n{START}\n\nIt rained.\n\n{END}\n\nSection 1. You may.", ["It rained."], 2),
    (f"Chapter 1\n\nIt rained.\n\nEnd of Project Gutenberg's A, by B\n\n{END}\n\nx", ["Chapter 1", "It rained."], 1),
    ("*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\nIt rained.", ["It rained."], 1),
    ("He read of Project Gutenberg.\n\nThe end of it.", ["He read of Project Gutenberg.", "The end of it."], 0),
])  # fmt: skip
def test_the_licence_of_project_gutenberg_is_left_out(text: str, spoken: list[str], count: int) -> None:
    for book in (plain_book(text, "T"), markdown_book(text, "T", 1)):
        assert [each.text for _, each in book.spoken()] == spoken
        assert sum(book.left_out.values()) == count


@pytest.mark.parametrize(("content", "message"), [
    ("Привет, мир".encode("cp1251"), "byte 0 is not UTF-8, and the file is not windows-1252"),
    ("春はあけぼの。やうやう".encode("shift-jis"), "not windows-1252"),
    ("Où est le café ?".encode() + b"\xe9", "byte 18 is not UTF-8"),
    (b"\x89PNG\x1a\xff\x03", "not windows-1252"), (b"caf\xe9 \x81", "byte 3 is not UTF-8"),
    (b"a\0b", "it contains zero bytes"),
])  # fmt: skip
def test_files_that_are_no_text(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=message):
        read_text(file, [])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-8", "cp1252"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("“Né à 5 €”\r\nx".encode(encoding))
    remarks: list[str] = []
    assert read_text(file, remarks) == "“Né à 5 €”\nx"
    said = ["a.txt is not UTF-8 and was read as windows-1252. Save it as UTF-8 if letters are wrong"]
    assert remarks == (said if encoding == "cp1252" else [])


def test_a_text_without_words_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no text to speak"):
        plain_book("* * *\n\n...", "T")

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


@pytest.mark.parametrize(
    "line",
    ["Chapter 1", "CHAPTER IV. THE STORM", "Chapter One: Rain", "Part Two", "Kapitel eins", "Prologue", "第三章"],
)
def test_lines_that_begin_chapters(line: str) -> None:
    assert [title for title, _ in shape(plain_book(f"x.\n\n{line}\n\ny.", "T"))] == ["T", line]


@pytest.mark.parametrize(
    "line", ["Part of it was dry.", "Book it now", "Chapter one was long, he said.", "Introduction to it"]
)
def test_lines_that_do_not(line: str) -> None:
    assert [title for title, _ in shape(plain_book(f"x.\n\n{line}\n\ny.", "T"))] == ["T"]


def test_without_blank_lines_each_line_is_a_paragraph() -> None:
    assert shape(plain_book("One.\nTwo.", "T")) == [("T", ["One.", "Two."])]


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


def test_markdown_with_chapters_at_the_first_level() -> None:
    assert shape(markdown_book("# A\nx.\n# B\ny.", "f", 1)) == [("A", ["A", "x."]), ("B", ["B", "y."])]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caf\xe9", "byte 3 is no utf-8-sig: save it as UTF-8"),
        (b"a\0b", "it has zero bytes"),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=message):
        read_text(file)


def test_encodings(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    for encoding in ("utf-8-sig", "utf-16", "utf-8"):
        file.write_bytes("é\r\nx".encode(encoding))
        assert read_text(file) == "é\nx"


def test_a_text_without_words_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no text to speak"):
        plain_book("* * *\n\n...", "T")

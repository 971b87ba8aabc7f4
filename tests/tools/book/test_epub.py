"""EPUBs are read in their order, by the rules of docs/books.md; what is no honest book is refused by name."""

import zipfile
from pathlib import Path

import pytest

from deployments.errors import InvalidRequest
from talkray_tools.book import epub, pages
from talkray_tools.book.epub import EpubRules, epub_book
from talkray_tools.book.text import Book
from tests.tools.book.epubs import CONTAINER, link, nav, ncx, page, point, write_epub

FONT = """<encryption xmlns="urn:oasis:names:tc:opendocument:xmlns:container" xmlns:enc="http://www.w3.org/2001/04/xmlenc#">
<enc:EncryptedData><enc:EncryptionMethod Algorithm="{method}"/><enc:CipherData>
<enc:CipherReference URI="{path}"/></enc:CipherData></enc:EncryptedData></encryption>"""


def read(file: Path, **rules: object) -> Book:
    return epub_book(file, EpubRules(**rules))  # type: ignore[arg-type]


def shape(book: Book) -> list[tuple[str, list[str]]]:
    return [(chapter.title, [each.text for each in chapter.paragraphs]) for chapter in book.chapters]


def test_an_ordinary_book(tmp_path: Path) -> None:
    body = {
        "cover.xhtml": page('<img src="c.jpg" alt="A cover"/>'),
        "one.xhtml": page(
            "<h1>One</h1><p>Fish &amp; chips&nbsp;cost &pound;5.</p><div>Loose<p>Inner</p>tail<br/>end</div>"
        ),
        "two.xhtml": page('<p id="start">No heading <em>here</em>.</p><hr/><p>After the break.</p>'),
    }
    links = link("one.xhtml", "One") + link("two.xhtml#start", "The  Second")
    book = read(write_epub(tmp_path / "a.epub", body, extra={"OEBPS/nav.xhtml": nav(links)}))
    assert (book.title, book.author, book.language, book.date) == ("A Book", "Ann Author", "en", "2026-01-02")
    assert shape(book) == [
        ("One", ["One", "Fish & chips cost £5.", "Loose", "Inner", "tail\nend"]),
        ("The Second", ["The Second", "No heading here.", "", "After the break."]),
    ]
    assert [each.kind for each in book.chapters[1].paragraphs] == ["heading", "text", "break", "text"]
    assert book.left_out == {"page OEBPS/cover.xhtml: pictures only": 1}


@pytest.mark.parametrize("is_ncx", [False, True])
@pytest.mark.parametrize(
    ("depth", "titles"), [(1, ["Part I", "Part II"]), (2, ["Part I", "First", "Second", "Part II"])]
)
def test_nested_navigation(tmp_path: Path, is_ncx: bool, depth: int, titles: list[str]) -> None:
    body = {
        "p1.xhtml": page(
            '<h1>Part I</h1><p>Intro.</p><h2 id="a">First</h2><p>A.</p><h2><a id="b"/>Second</h2><p>B.</p>'
        ),
        "p1b.xhtml": page("<p>B goes on.</p>"),
        "p2.xhtml": page("<h1>Part II</h1><p>C.</p>"),
    }
    extra = {
        "OEBPS/nav.xhtml": nav(
            link("p1.xhtml", "Part I", link("p1.xhtml#a", "First") + link("p1.xhtml#b", "Second"))
            + link("p2.xhtml", "Part II")
        )
    }
    if is_ncx:
        points = point("p1.xhtml", "Part I", point("p1.xhtml#a", "First") + point("p1.xhtml#b", "Second"))
        extra = {"OEBPS/toc.ncx": ncx(points + point("p2.xhtml", "Part II"))}
    book = read(write_epub(tmp_path / "a.epub", body, extra=extra), depth=depth)
    assert [chapter.title for chapter in book.chapters] == titles
    everything = [each.text for chapter in book.chapters for each in chapter.paragraphs]
    assert everything == ["Part I", "Intro.", "First", "A.", "Second", "B.", "B goes on.", "Part II", "C."]
    if depth == 2:
        assert shape(book)[2] == ("Second", ["Second", "B.", "B goes on."])


def test_without_navigation_each_page_is_a_chapter(tmp_path: Path) -> None:
    body = {"a.xhtml": page("<h2>Alpha</h2><p>x.</p>"), "b.xhtml": page("<p>y.</p>")}
    assert [title for title, _ in shape(read(write_epub(tmp_path / "a.epub", body)))] == ["Alpha", "Page 2"]


NOTES = (
    '<p>Word<a epub:type="noteref" href="#n1">1</a> and<sup><a href="#n2">2</a></sup> more'
    '<a href="#n3"><sup>3</sup></a>.</p>'
    '<aside epub:type="footnote" id="n1"><p>A note.</p></aside>'
    '<section role="doc-endnotes"><p>An end note.</p></section>'
    '<p>x<sup>2</sup> stays, as does <a href="#n1">a link</a>.</p>'
)


def test_notes(tmp_path: Path) -> None:
    file = write_epub(tmp_path / "a.epub", {"a.xhtml": page(NOTES)})
    book = read(file)
    assert shape(book)[0][1][1:] == ["Word and more.", "x2 stays, as does a link."]
    assert book.left_out == {"references to notes": 3, "notes": 2}
    assert shape(read(file, notes=True))[0][1][2:4] == ["A note.", "An end note."]


TABLE = (
    "<p>Before.</p><table><tr><th>Name</th><th>Age</th></tr><tr><td><p>Ann</p></td><td>4</td></tr>"
    "<tr><td/><td>Who?</td></tr></table><p>Behind.</p>"
)


def test_tables(tmp_path: Path) -> None:
    file = write_epub(tmp_path / "a.epub", {"a.xhtml": page(TABLE)})
    assert shape(read(file))[0][1][1:] == ["Before.", "Name, Age.", "Ann, 4.", "Who?", "Behind."]
    skipped = read(file, tables=False)
    assert (shape(skipped)[0][1][1:], skipped.left_out) == (["Before.", "Behind."], {"tables": 1})


def test_what_is_not_read(tmp_path: Path) -> None:
    body = (
        "<pre>code()</pre><script>x</script><p hidden=''>no</p><ruby>漢<rt>kan</rt></ruby><svg><text>no</text></svg>"
        "<span epub:type='pagebreak'>12</span><math><mi>x</mi></math><p>***</p>"
    )
    pages_ = {"a.xhtml": page(body), "b.xhtml": page("<p>Aside.</p>")}
    book = read(write_epub(tmp_path / "a.epub", pages_, linear={"b.xhtml": "no"}))
    assert shape(book)[0][1][1:] == ["漢"]
    assert book.left_out == {"pages outside the reading order": 1, "code blocks": 1, "formulas": 1}


def test_chinese_and_mixed(tmp_path: Path) -> None:
    body = {"a.xhtml": page("<h1>第一章</h1><p>[小明]: 你好,world!</p><p>" + "很长的一句话。" * 700 + "</p>")}
    book = read(write_epub(tmp_path / "a.epub", body, title="书", language="zh"))
    first, second, *long = book.chapters[0].paragraphs
    assert (first.text, second.text, second.speaker) == ("第一章", "你好,world!", "小明")
    assert len(long) > 2
    assert "".join(each.text for each in long) == "很长的一句话。" * 700


def test_a_cover(tmp_path: Path) -> None:
    item = '<item id="c" href="i/c.png" media-type="image/png" properties="cover-image"/>'
    file = write_epub(
        tmp_path / "a.epub", {"a.xhtml": page("<p>x.</p>")}, extra={"OEBPS/i/c.png": b"\x89PNG"}, manifest=item
    )
    assert read(file).cover == b"\x89PNG"


def refusal(file: Path) -> str:
    with pytest.raises(InvalidRequest) as refused:
        read(file)
    assert str(file) in str(refused.value) or "declares XML entities" in str(refused.value)
    return str(refused.value)


BOMB = "<!DOCTYPE html [<!ENTITY a 'aaaa'><!ENTITY b '&a;&a;'>]><html><body><p>&b;</p></body></html>"


def test_entities_are_refused_in_pages_package_and_navigation(tmp_path: Path) -> None:
    assert "a.xhtml declares XML entities" in refusal(write_epub(tmp_path / "a.epub", {"a.xhtml": BOMB}))
    extra = {"OEBPS/nav.xhtml": BOMB}
    assert "nav.xhtml declares" in refusal(write_epub(tmp_path / "b.epub", {"a.xhtml": page("<p>x</p>")}, extra=extra))
    with zipfile.ZipFile(tmp_path / "c.epub", "w") as archive:
        archive.writestr("META-INF/container.xml", "<!DOCTYPE c [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><c>&a;</c>")
    assert "container.xml declares XML entities" in refusal(tmp_path / "c.epub")


LOOSE = [
    ("<p>One<br>two & three<p>Next &eacute;&nbsp;x<hr>After", ["One\ntwo & three", "Next é x", "", "After"]),
    ("<P>Upper<P>Case <B>bold</P><P>rest</B> more</P>", ["Upper", "Case bold", "rest more"]),
    ("<p>a<div>b</div>c</p>d</span></b>", ["a", "b", "c", "d"]),
    ("<ul><li>One<li>Two<ul><li>in</ul><li>Three</ul>tail", ["One", "Two", "in", "Three", "tail"]),
    ("<table><td>Name<td>Age<tr><td>Ann<td>4</table>After", ["Name, Age.", "Ann, 4.", "After"]),
    ("<dl><dt>Term<dd>Meaning<dt>Other<dd>Too</dl>", ["Term", "Meaning", "Other", "Too"]),
    ("<h1>Head</h2>Text<p>x<a href='#n'><sup>1</sup></a> y <img src=a.png>", ["Head", "Text", "x y"]),
    ("<script>if (a<b) x</script><style>p{}</style><!-- c & d --><p>ok<p/>then<a name=x />", ["ok", "then"]),
    ("<font><center><p>In old tags</font></center><i>and unclosed", ["In old tags", "and unclosed"]),
    ("<p>1 < 2 && 3 > 2 &copy; &#8212; &bogus;", ["1 < 2 && 3 > 2 © — &bogus;"]),
]


@pytest.mark.parametrize(("body", "texts"), LOOSE)
@pytest.mark.parametrize("head", ["<html><head><title>T<body>", "<title>T</title>", page("").partition("</body>")[0]])
def test_loose_html_is_read_as_browsers_read_it(head: str, body: str, texts: list[str]) -> None:
    found = pages.read_page((head + body + "<br>").encode(), "a.xhtml", notes=False, tables=True)
    assert [each.text for each in found.paragraphs] == texts
    assert found.not_xml.startswith("a.xhtml is not XML: ")


@pytest.mark.parametrize(("head", "encoding"), [
    ("", "utf-8"), ("", "cp1252"), ("", "utf-16"),
    ('<?xml version="1.0" encoding="iso-8859-2"?>', "iso-8859-2"),
    ("<meta content='text/html; charset=windows-1251'>", "cp1251"),
    ("<meta charset=latin1>", "cp1252"),
])  # fmt: skip
def test_encodings_of_loose_html(tmp_path: Path, head: str, encoding: str) -> None:
    text = {"cp1251": "Да", "iso-8859-2": "Říp"}.get(encoding, "Né “à”")
    content = f"{head}<h1>One</h1><p>{text}<br>".encode(encoding)
    book = read(write_epub(tmp_path / "a.epub", {"a.xhtml": content, "b.xhtml": page("<p>x</p>")}))
    assert shape(book)[0] == ("One", ["One", text])
    assert book.remarks[0].startswith("read as loose HTML: 1 of 2 pages, first OEBPS/a.xhtml is not XML: ")


def test_the_package_may_have_bare_ampersands_and_a_broken_table_of_contents(tmp_path: Path) -> None:
    body = {"a.xhtml": page("<h1>Fish</h1><p>x.</p>")}
    extra = {"OEBPS/toc.ncx": ncx(point("a.xhtml", "Fish & Chips"))}
    book = read(write_epub(tmp_path / "a.epub", body, extra=extra, title="Salt & Vinegar"))
    assert (book.title, book.chapters[0].title) == ("Salt & Vinegar", "Fish & Chips")
    book = read(write_epub(tmp_path / "b.epub", body, extra={"OEBPS/toc.ncx": "<ncx><navMap></ncx>"}))
    assert book.chapters[0].title == "Fish"
    assert book.left_out == {"table of contents OEBPS/toc.ncx: it is not XML": 1}


def test_the_licence_of_project_gutenberg_is_left_out(tmp_path: Path) -> None:
    body = {
        "a.xhtml": page('<section class="pg-boilerplate" id="pg-header"><p>Licence</p></section><h1>A</h1><p>x.</p>'),
        "b.xhtml": page("<p>y.</p><p>*** END OF THE PROJECT GUTENBERG EBOOK A ***</p><p>Terms.</p>"),
    }
    book = read(write_epub(tmp_path / "a.epub", body))
    assert [each.text for _, each in book.spoken()] == ["A", "x.", "Page 2", "y."]
    assert book.left_out == {"licence of Project Gutenberg": 2}


def test_other_encodings(tmp_path: Path) -> None:
    text = (
        '<?xml version="1.0" encoding="iso-8859-1"?><html><body><p>caf\u00e9 &eacute;&#x21; &unknown;</p></body></html>'
    )
    file = write_epub(tmp_path / "a.epub", {"a.xhtml": text.encode("latin-1")})
    assert shape(read(file))[0][1][1:] == ["café é!"]


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = page("<p>" + "a" * (3 << 20) + "</p>")
    assert "a.xhtml may be a zip bomb" in refusal(write_epub(tmp_path / "a.epub", {"a.xhtml": big}))
    monkeypatch.setattr(epub, "MAX_ENTRIES", 4)
    small = {f"{number}.xhtml": page("<p>x</p>") for number in range(3)}
    assert "it has 6 entries" in refusal(write_epub(tmp_path / "b.epub", small))
    monkeypatch.setattr(epub, "MAX_ENTRIES", 10)
    monkeypatch.setattr(epub, "MAX_READ_BYTES", 1500)
    assert "its pages exceed 0 MiB" in refusal(write_epub(tmp_path / "c.epub", small))


@pytest.mark.parametrize(("extra", "named"), [
    (
        {
            "META-INF/encryption.xml": FONT.format(
                method="http://www.w3.org/2001/04/xmlenc#aes128-cbc", path="OEBPS/a.xhtml",
            ),
        },
        "OEBPS/a.xhtml is encrypted",
    ),
    ({"META-INF/rights.xml": "<rights/>"}, "Adobe's copy protection"),
    ({"META-INF/sinf.xml": "<x/>"}, "Apple's copy protection"),
    ({"META-INF/license.lcpl": "{}"}, "Readium's copy protection"),
])  # fmt: skip
def test_copy_protection_is_refused_by_name(tmp_path: Path, extra: dict[str, str | bytes], named: str) -> None:
    told = refusal(write_epub(tmp_path / "a.epub", {"a.xhtml": page("<p>x.</p>")}, extra=extra))
    assert named in told
    assert "DRM" in told


def test_fonts_may_be_obfuscated(tmp_path: Path) -> None:
    extra = {"META-INF/encryption.xml": FONT.format(method="http://www.idpf.org/2008/embedding", path="OEBPS/f.otf")}
    assert shape(read(write_epub(tmp_path / "a.epub", {"a.xhtml": page("<p>x.</p>")}, extra=extra)))


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.epub"
    file.write_bytes(b"%PDF-1.7")
    assert "is not an EPUB" in refusal(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x", "y")
    assert "META-INF/container.xml is missing" in refusal(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("META-INF/container.xml", CONTAINER)
    assert "OEBPS/book.opf is referenced but missing" in refusal(file)
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        read(tmp_path / "none.epub")
    pictures = {"a.xhtml": page('<svg><image href="a.png"/></svg>')}
    assert "and some pages contain only pictures" in refusal(write_epub(file, pictures))


def test_elements_may_be_deep_in_each_other_up_to_a_bound() -> None:
    def read_depth(depth: int) -> list[str]:
        found = pages.read_page(b"<div>" * depth + b"deep" + b"</div>" * depth, "a.xhtml", notes=False, tables=True)
        return [each.text for each in found.paragraphs]

    assert read_depth(pages.MAX_DEPTH) == ["deep"]
    with pytest.raises(InvalidRequest, match=r"a\.xhtml nests elements more than 1000 levels deep"):
        read_depth(pages.MAX_DEPTH + 1)

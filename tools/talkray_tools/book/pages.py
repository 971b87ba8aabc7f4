"""Convert an EPUB page to paragraphs: headings, text, breaks and table rows.

Notes, code and pictures are left out. Pages should be XHTML; `_LooseHtml` reads pages that are not valid XML.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from html.entities import html5
from html.parser import HTMLParser
from typing import Protocol
from xml.parsers import expat

from deployments.errors import InvalidRequest
from talkray_tools.book.text import LICENCE, Kind, Paragraph, paragraphs_of

MAX_DEPTH = 1000
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_BLOCKS = (
    *_HEADINGS,
    *(
        "p",
        "div",
        "section",
        "article",
        "aside",
        "blockquote",
        "li",
        "ul",
        "ol",
        "dl",
        "dt",
        "dd",
        "figcaption",
        "figure",
    ),
    *("body", "header", "footer", "main", "nav", "caption", "table", "address", "center", "hr"),
)
# Elements that are left out, with their names in the report. Elements with an empty name are not reported.
_SILENT = {
    **dict.fromkeys(
        ("head", "title", "script", "style", "template", "rt", "rp", "audio", "video", "object", "iframe", "svg"), ""
    ),
    "pre": "code blocks",
    "math": "formulas",
}
_NOTES = {"footnote", "footnotes", "endnote", "endnotes", "rearnote", "rearnotes", "note", "sidenote"}
_NOTE_ROLES = {"doc-footnote", "doc-endnote", "doc-endnotes"}
_REFERENCES = {"noteref", "doc-noteref", "backlink", "doc-backlink"}
_UNREAD_TYPES = {"pagebreak", "toc", "page-list", "landmarks", "index", "doc-pagebreak", "doc-toc", "doc-index"}
_SPACE = re.compile(r"\s+")
# HTML parsing rules: elements without an end tag, elements that end where another element begins, and elements that
# limit the reach of an end tag.
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"}
_IN_HEAD = {"title", "meta", "link", "style", "script", "base", "template", "noscript", "object"}
_CELLS = ("td", "th")
_ENDED_BY = {
    "li": ("li",),
    **dict.fromkeys(("dt", "dd"), ("dt", "dd")),
    **dict.fromkeys(_CELLS, _CELLS),
    **dict.fromkeys(("tr", "tbody", "thead", "tfoot"), ("tr", "tbody", "thead", "tfoot", "td", "th", "caption")),
    **dict.fromkeys(_HEADINGS, _HEADINGS),
    **dict.fromkeys((*_BLOCKS, "pre"), ()),
}
_SCOPES = {"li": ("ul", "ol"), "dt": ("dl",), "dd": ("dl",)}
_META_CHARSET = re.compile(rb"""<(?:meta|\?xml)\b[^>]*?(?:charset|encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.I)
_ENDS = (".", "!", "?", ":", ";", "。", "！", "？", "…")  # noqa: RUF001


@dataclass(slots=True)
class PageContent:
    """Paragraphs of one page, and the number of paragraphs before each anchor."""

    paragraphs: list[Paragraph] = field(default_factory=list)
    anchors: dict[str, int] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    num_pictures: int = 0
    not_xml: str = ""  # the XML error, if the page was read as loose HTML

    @property
    def heading(self) -> str:
        return next((each.text for each in self.paragraphs if each.kind == "heading"), "")


class XmlTarget(Protocol):
    """Handler for the elements of an XML file. Names have no namespace prefix, except `epub:type`."""

    def start(self, tag: str, values: dict[str, str]) -> object: ...

    def end(self, tag: str) -> object: ...

    def data(self, text: str) -> object: ...


def parse_xml(content: bytes, name: str, target: XmlTarget) -> None:
    """Parse XML without opening other files. Only HTML's named entities are supported.

    Raises `InvalidRequest` with the file's name if the file declares entities, nests elements deeper than MAX_DEPTH, or
    is not valid XML.
    """
    parser, depth = expat.ParserCreate(), 0

    def refuse(*_: object) -> None:
        raise InvalidRequest(f"{name} declares XML entities, which are not supported because they can expand", "file")

    def start(tag: str, values: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{name} nests elements more than {MAX_DEPTH} levels deep", "file")
        plain = {"epub:type" if key.endswith(":type") else _plain(key): value for key, value in values.items()}
        target.start(_plain(tag), plain)

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        target.end(_plain(tag))

    parser.EntityDeclHandler = refuse
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = target.data
    parser.UseForeignDTD(True)  # makes undeclared HTML entities acceptable
    parser.SkippedEntityHandler = lambda entity, _: target.data(html5.get(f"{entity};", ""))
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, ValueError) as error:  # expat raises ValueError for an unknown encoding
        raise NotXml(f"{name} is not XML: {error}", "file") from None


class NotXml(InvalidRequest):
    """Error for a file that is not valid XML. The message contains the position."""


def _plain(name: str) -> str:
    return name.rpartition(":")[2]


def read_page(content: bytes, name: str, *, notes: bool, tables: bool) -> PageContent:
    """Read a page as XML, or as HTML if the XML is malformed. Raises `InvalidRequest` as `parse_xml` does."""
    reader = _Reader(notes=notes, tables=tables)
    try:
        parse_xml(content, name, reader)
    except NotXml as error:
        reader = _Reader(notes=notes, tables=tables)
        loose = _LooseHtml(reader, name)
        loose.feed(_html_text(content, name))
        loose.finish()
        reader.content.not_xml = error.message
    reader.end_block()
    return reader.content


def _html_text(content: bytes, name: str) -> str:
    """Decode by byte order mark, by declaration, as UTF-8, or as windows-1252. Raises `InvalidRequest`."""
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return content.decode("utf-16", "replace")
    declared = _META_CHARSET.search(content[:2048])
    for encoding in ("utf-8-sig", declared[1].decode() if declared else "cp1252", "cp1252"):
        try:
            return content.decode("cp1252" if encoding.lower() in ("iso-8859-1", "latin1") else encoding)
        except (UnicodeDecodeError, LookupError):
            continue
    raise InvalidRequest(f"{name} has an unknown encoding. Save it as UTF-8", "file")


class _LooseHtml(HTMLParser):
    """HTML parser that calls `target` with properly nested elements, as an XML parser does.

    HTML's rules close an element without an end tag. An end tag without an element is ignored, and `<p/>` is empty.
    """

    def __init__(self, target: XmlTarget, name: str) -> None:
        super().__init__(convert_charrefs=True)
        self._target, self._name = target, name
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        tag = _plain(tag)
        if tag not in _IN_HEAD:
            self._end("head", "title", until=("svg",))
        if tag in _ENDED_BY:
            self._end("p", until=("table", *_CELLS))
            while self._end(*_ENDED_BY[tag], until=_SCOPES.get(tag, ("table",))):
                pass
        if tag in _CELLS and self._last("tr") <= self._last("table"):
            self._start("tr", {})
        values = {"epub:type" if key.endswith(":type") else _plain(key): value or "" for key, value in attrs}
        self._start(tag, values)
        if tag in _VOID:
            self._end_through(len(self._open) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if _plain(tag) not in _VOID:
            self._end_through(len(self._open) - 1)

    def handle_endtag(self, tag: str) -> None:
        tag = _plain(tag)
        if tag == "br":
            self.handle_starttag(tag, [])
        elif tag in ("body", "html"):
            return  # keep the page open, because content may follow these end tags
        elif tag == "p" and self._last("p") < 0:
            self.handle_startendtag(tag, [])
        elif tag in _BLOCKS or tag in ("tr", "tbody", "thead", "tfoot", "head"):
            self._end(*(_HEADINGS if tag in _HEADINGS else (tag,)), until=() if tag == "table" else ("table",))
        elif tag in _CELLS:
            self._end(tag, until=("table",))
        else:  # inline element: its end tag does not close a block
            self._end(tag, until=(*_BLOCKS, *_CELLS))

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["head"] and data.strip():
            self._end("head", until=())
        self._target.data(data)

    def finish(self) -> None:
        self.close()
        self._end_through(0)

    def _start(self, tag: str, values: dict[str, str]) -> None:
        if len(self._open) >= MAX_DEPTH:
            raise InvalidRequest(f"{self._name} nests elements more than {MAX_DEPTH} levels deep", "file")
        self._open.append(tag)
        self._target.start(tag, values)

    def _end(self, *tags: str, until: tuple[str, ...]) -> bool:
        """Close the innermost open element in `tags` and its content, unless one in `until` is open inside it."""
        place = max(map(self._last, tags), default=-1)
        if is_found := place >= 0 and place >= max(map(self._last, until), default=-1):
            self._end_through(place)
        return is_found

    def _last(self, tag: str) -> int:
        return next((place for place in range(len(self._open) - 1, -1, -1) if self._open[place] == tag), -1)

    def _end_through(self, place: int) -> None:
        while len(self._open) > place:
            self._target.end(self._open.pop())


@dataclass(frozen=True, slots=True)
class _Element:
    name: str
    is_silent: bool  # whether to skip the element and its content


class _Reader:
    def __init__(self, *, notes: bool, tables: bool) -> None:
        self._reads_notes, self._reads_tables = notes, tables
        self.content = PageContent()
        self._open: list[_Element] = []
        self._text: list[str] = []  # text of the current paragraph or cell
        self._cells: list[str] | None = None  # cells of the current row; None outside a row

    def start(self, tag: str, values: dict[str, str]) -> None:
        if tag in _BLOCKS:
            self._begin_block()
        for anchor in (values.get("id"), values.get("name") if tag == "a" else None):
            if anchor:
                self.content.anchors.setdefault(anchor, len(self.content.paragraphs))
        was_silent = self._is_silent
        if not was_silent:
            self._begin_element(tag)
        reason = self._unread(tag, values)
        if reason and not was_silent:
            self.content.left_out[reason] += 1
        self._open.append(_Element(tag, was_silent or reason is not None))

    def _begin_element(self, tag: str) -> None:
        match tag:
            case "img" | "svg":
                self.content.num_pictures += 1
            case "br":
                self._text.append("\n")
            case "hr":
                self.content.paragraphs.append(Paragraph("", "break"))
            case "tr":
                self.end_block()
                self._cells = []

    def end(self, tag: str) -> None:
        if tag in _BLOCKS:
            self._begin_block()
        if tag in ("td", "th") and self._in_row and not self._is_silent:
            self._end_cell()
        if tag == "tr" and self._in_row:
            self._end_row()
        self._open.pop()

    def data(self, text: str) -> None:
        if not self._is_silent:
            self._text.append(_SPACE.sub(" ", text))

    def _begin_block(self) -> None:
        if self._in_row:
            self._text.append(" ")
        else:
            self.end_block()

    def end_block(self) -> None:
        """Add the text collected since the last block as a paragraph."""
        text, self._text = "".join(self._text), []
        lines = "\n".join(_SPACE.sub(" ", line).strip() for line in text.split("\n")).strip()
        heading = any(element.name in _HEADINGS for element in self._open)
        kind: Kind = "heading" if heading else "text"
        if heading:
            lines = lines.replace("\n", " ")
        self.content.paragraphs += paragraphs_of(lines, kind)

    @property
    def _is_silent(self) -> bool:
        return bool(self._open) and self._open[-1].is_silent

    @property
    def _in_row(self) -> bool:
        return self._cells is not None

    def _end_cell(self) -> None:
        assert self._cells is not None
        cell, self._text = _SPACE.sub(" ", "".join(self._text)).strip(), []
        if cell:
            self._cells.append(cell)

    def _end_row(self) -> None:
        """Add the row's cells as one sentence, separated by commas."""
        cells, self._cells = self._cells or [], None
        row = ", ".join(cell.rstrip(",") for cell in cells)
        self._text = [row if row.endswith(_ENDS) else f"{row}." if row else ""]
        self.end_block()

    def _unread(self, tag: str, values: dict[str, str]) -> str | None:
        """Return a skipped element's name in the report (empty if unreported), or None if the element is read."""
        types = {*values.get("epub:type", "").split(), *values.get("role", "").split()}
        if values.get("id") in ("pg-header", "pg-footer") or "pg-boilerplate" in values.get("class", "").split():
            return LICENCE
        if "hidden" in values or values.get("aria-hidden") == "true" or types & _UNREAD_TYPES:
            return ""
        is_raised = bool(self._open) and {tag, self._open[-1].name} == {"a", "sup"}
        if (types & _REFERENCES or is_raised) and not self._reads_notes:
            return "references to notes"
        if (types & _NOTES or types & _NOTE_ROLES) and not self._reads_notes:
            return "notes"
        if tag == "table" and not self._reads_tables:
            return "tables"
        return _SILENT.get(tag)

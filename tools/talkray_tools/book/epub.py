"""Read an EPUB as a book. The spine gives the order of the pages, and the navigation gives the chapters.

Entries are read without unpacking the archive. Copy protection, XML entities and decompression bombs are rejected, each
with a specific message. Paths outside the archive are never opened.
"""

import posixpath
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

from deployments.errors import InvalidRequest
from talkray_tools.book.pages import NotXml, PageContent, parse_xml, read_page
from talkray_tools.book.text import Book, Chapter, finished, paragraphs_of

MAX_ENTRIES = 10_000
MAX_ENTRY_BYTES = 32 << 20  # per page or package file
MAX_READ_BYTES = 512 << 20  # total uncompressed bytes read from one archive
MAX_RATIO = 200  # uncompressed size over compressed size of a page; checked for pages larger than _SMALL
MAX_COVER_BYTES = 16 << 20
_SMALL = 1 << 20
_CONTAINER, _ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
_RIGHTS = {"META-INF/rights.xml": "Adobe's", "META-INF/sinf.xml": "Apple's", "META-INF/license.lcpl": "Readium's"}
_FONTS_ONLY = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")  # allowed: font obfuscation
_PAGES = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")
_PICTURES = ": pictures only"
_BARE = re.compile(rb"&(?!#?\w+;)")
_NCX = "application/x-dtbncx+xml"


@dataclass(frozen=True, slots=True)
class EpubRules:
    """Options for reading pages, and how many navigation levels begin chapters."""

    depth: int = 2
    notes: bool = False
    tables: bool = True


@dataclass(frozen=True, slots=True)
class _Item:
    path: str
    media_type: str
    properties: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One navigation entry: the place where a chapter begins."""

    title: str
    path: str
    anchor: str
    level: int  # top level: 1


@dataclass(slots=True)
class _Package:
    book: Book
    items: dict[str, _Item]
    spine: list[_Item] = field(default_factory=list)
    entries: list[_Entry] = field(default_factory=list)


def epub_book(file: Path, rules: EpubRules) -> Book:
    """Read an EPUB. Raises `InvalidRequest` with the error and where it is in the archive."""
    try:
        with zipfile.ZipFile(file) as opened:
            archive = _Archive(opened, file)
            archive.refuse_protection()
            package = _read_package(archive)
            _fill(package, archive, rules)
    except zipfile.BadZipFile as error:
        raise InvalidRequest(f"{file} is not an EPUB: {error}", "file") from None
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror or error}", "file") from None
    book = package.book
    try:
        return finished(book)
    except InvalidRequest:
        pictures = (
            ", and some pages contain only pictures" if any(each.endswith(_PICTURES) for each in book.left_out) else ""
        )
        raise InvalidRequest(
            f"{file} has no text to speak on its {len(package.spine)} pages{pictures}", "file"
        ) from None


class _Archive:
    """ZIP archive reader that enforces size limits regardless of the sizes that the archive declares."""

    def __init__(self, opened: zipfile.ZipFile, file: Path) -> None:
        self._opened, self._file = opened, file
        self._left = MAX_READ_BYTES
        entries = opened.infolist()
        if len(entries) > MAX_ENTRIES:
            raise self.refusal(f"it has {len(entries):,} entries; the limit is {MAX_ENTRIES:,}")
        self._entries = {entry.filename: entry for entry in entries}

    def refusal(self, reason: str) -> InvalidRequest:
        return InvalidRequest(f"{self._file}: {reason}", "file")

    def __contains__(self, path: str) -> bool:
        return path in self._entries

    def read(self, path: str, most: int = MAX_ENTRY_BYTES) -> bytes:
        entry = self._entries.get(path)
        if entry is None:
            raise self.refusal(f"{path} is referenced but missing")
        if entry.flag_bits & 1:
            raise self.refusal(f"{path} is encrypted with a password: only books without copy protection can be read")
        most = min(most, self._left)
        try:
            with self._opened.open(entry) as stream:
                content = stream.read(most + 1)
        except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, ValueError) as error:
            raise self.refusal(f"{path} is damaged: {error}") from None
        is_bomb = len(content) > _SMALL and len(content) > MAX_RATIO * max(1, entry.compress_size)
        if len(content) > self._left:
            raise self.refusal(f"its pages exceed {MAX_READ_BYTES >> 20} MiB, so it may be a zip bomb")
        if len(content) > most or is_bomb:
            size = f"{entry.compress_size:,} bytes in the archive become {'more than ' * (len(content) > most)}"
            raise self.refusal(f"{path} may be a zip bomb: {size}{min(len(content), most):,}")
        self._left -= len(content)
        return content

    def xml(self, path: str) -> ElementTree.Element:
        """Parse an entry as XML. Accepts a bare `&`, which is common in titles. Raises `NotXml`."""
        content, name = self.read(path), f"{self._file}: {path}"
        builder = ElementTree.TreeBuilder()
        try:
            parse_xml(content, name, builder)
        except NotXml:
            builder = ElementTree.TreeBuilder()
            parse_xml(_BARE.sub(b"&amp;", content), name, builder)
        return builder.close()

    def refuse_protection(self) -> None:
        """Reject copy protection, even if it applies only to some pages. Accepts obfuscated fonts."""
        owner = next((whose for path, whose in _RIGHTS.items() if path in self), None)
        encrypted = list(self._encrypted()) if _ENCRYPTION in self else []
        if owner is None and not encrypted:
            return
        whose = f"{owner} copy protection" if owner else "copy protection"
        where = f"{encrypted[0]} is encrypted" if encrypted else "it has a rights file"
        raise self.refusal(f"it has {whose} (DRM; {where}): only books without DRM can be read")

    def _encrypted(self) -> Iterator[str]:
        for data in self.xml(_ENCRYPTION).iter("EncryptedData"):
            method, reference = data.find("EncryptionMethod"), data.find(".//CipherReference")
            if method is None or method.get("Algorithm") not in _FONTS_ONLY:
                yield "a part" if reference is None else unquote(reference.get("URI", ""))


def _read_package(archive: _Archive) -> _Package:
    if _CONTAINER not in archive:
        raise archive.refusal(f"it is not an EPUB: {_CONTAINER} is missing")
    root = archive.xml(_CONTAINER).find(".//rootfile")
    if root is None or not root.get("full-path"):
        raise archive.refusal(f"{_CONTAINER} does not name a package")
    path = root.get("full-path", "")
    package = archive.xml(path)
    items = {
        item.get("id", ""): _Item(
            _resolved(path, item.get("href", "")), item.get("media-type", ""), tuple(item.get("properties", "").split())
        )
        for item in package.iter("item")
    }
    read = _Package(_described(package, archive, items), items)
    spine = package.find("spine")
    for reference in () if spine is None else spine.iter("itemref"):
        item = items.get(reference.get("idref", ""))
        if item is None:
            raise archive.refusal(f"its spine names {reference.get('idref')!r}, which is not in its manifest")
        if reference.get("linear") == "no":
            read.book.left_out["pages outside the reading order"] += 1
        elif "nav" not in item.properties:
            read.spine.append(item)
    if not read.spine:
        raise archive.refusal("its spine is empty, so the book has no pages to read")
    navigation = next((item for item in items.values() if "nav" in item.properties), None)
    ncx = items.get("" if spine is None else spine.get("toc", "")) or next(
        (item for item in items.values() if item.media_type == _NCX), None
    )
    for contents, entries_of in ((navigation, _of_navigation), (ncx, _of_ncx)):
        if contents is None or read.entries or contents.path not in archive:
            continue
        try:
            read.entries = list(entries_of(archive.xml(contents.path), contents.path))
        except NotXml:
            read.book.left_out[f"table of contents {contents.path}: it is not XML"] += 1
    return read


def _described(package: ElementTree.Element, archive: _Archive, items: dict[str, _Item]) -> Book:
    found = {name: _text_of(package.find(f".//{name}")) for name in ("title", "language", "date", "publisher")}
    authors = [_text_of(each) for each in package.iter("creator")]
    book = Book(
        found["title"] or "Untitled",
        author=", ".join(author for author in authors if author),
        language=found["language"],
        date=found["date"][:10],
        publisher=found["publisher"],
    )
    named = next((each.get("content", "") for each in package.iter("meta") if each.get("name") == "cover"), "")
    cover = next((item for item in items.values() if "cover-image" in item.properties), None) or items.get(named)
    if cover is not None and cover.path in archive:
        if cover.media_type in ("image/jpeg", "image/png", "image/jpg"):
            book.cover = archive.read(cover.path, MAX_COVER_BYTES)
        else:
            book.left_out[f"cover: it is {cover.media_type}, neither JPEG nor PNG"] += 1
    return book


def _text_of(element: ElementTree.Element | None) -> str:
    return "" if element is None else " ".join("".join(element.itertext()).split())


def _resolved(base: str, href: str) -> str:
    """Resolve a reference in the file `base` to a path in the archive. The path never points outside it."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(base), unquote(urlsplit(href).path)))
    return path.lstrip("./") if path.startswith("..") else path


def _entry(base: str, href: str, title: str, level: int) -> _Entry:
    path = _resolved(base, href) if urlsplit(href).path else base
    return _Entry(" ".join(title.split()), path, unquote(urlsplit(href).fragment), level)


def _of_ncx(root: ElementTree.Element, path: str) -> Iterator[_Entry]:
    def below(element: ElementTree.Element, level: int) -> Iterator[_Entry]:
        for point in element.findall("navPoint"):
            content = point.find("content")
            if content is not None:
                yield _entry(path, content.get("src", ""), _text_of(point.find("navLabel")), level)
            yield from below(point, level + 1)

    tree = root.find("navMap")
    if tree is not None:
        yield from below(tree, 1)


def _of_navigation(root: ElementTree.Element, path: str) -> Iterator[_Entry]:
    """Yield the links in `<nav epub:type="toc">`, with their depth in the nested lists."""

    def below(element: ElementTree.Element, level: int) -> Iterator[_Entry]:
        for child in element:
            if child.tag == "a" and child.get("href"):
                yield _entry(path, child.get("href", ""), _text_of(child), level)
            else:
                yield from below(child, level + (child.tag == "ol"))

    for nav in root.iter("nav"):
        if "toc" in nav.get("epub:type", "").split() or nav.get("role") == "doc-toc":
            yield from below(nav, 0)


def _fill(package: _Package, archive: _Archive, rules: EpubRules) -> None:
    """Add the chapters to the book. If there is none, each page is a chapter named after its first heading."""
    book, pages = package.book, {item.path for item in package.spine}
    entries = [entry for entry in package.entries if entry.level <= rules.depth and entry.path in pages]
    loose = []
    for item in package.spine:
        if item.media_type not in _PAGES:
            book.left_out[f"page {item.path}: it is {item.media_type or 'of no type'}"] += 1
            continue
        page = read_page(archive.read(item.path), item.path, notes=rules.notes, tables=rules.tables)
        book.left_out += page.left_out
        loose += [page.not_xml] if page.not_xml else []
        if not page.paragraphs and page.num_pictures:
            book.left_out[f"page {item.path}{_PICTURES}"] += 1
        own = [entry for entry in entries if entry.path == item.path]
        if not entries:
            own = [_Entry(page.heading or f"Page {len(book.chapters) + 1}", item.path, "", 1)]
        _add(book, page, own)
    if loose:
        book.remarks.append(f"read as loose HTML: {len(loose)} of {len(package.spine)} pages, first {loose[0]}")


def _add(book: Book, page: PageContent, entries: list[_Entry]) -> None:
    """Add a page's paragraphs. Paragraphs before the page's first navigation entry belong to the previous chapter."""
    starts = sorted(((page.anchors.get(entry.anchor, 0), entry) for entry in entries), key=lambda start: start[0])
    before = page.paragraphs[: starts[0][0]] if starts else page.paragraphs
    if before:
        if not book.chapters:
            book.chapters.append(Chapter(book.title))
        book.chapters[-1].paragraphs += before
    for number, (start, entry) in enumerate(starts):
        end = starts[number + 1][0] if number + 1 < len(starts) else len(page.paragraphs)
        paragraphs = page.paragraphs[start:end]
        title = entry.title or next((each.text for each in paragraphs if each.kind == "heading"), "")
        if paragraphs and paragraphs[0].kind != "heading" and entry.title and start != end:
            paragraphs = [*paragraphs_of(entry.title, "heading"), *paragraphs]
        book.chapters.append(Chapter(title or f"Chapter {len(book.chapters) + 1}", paragraphs))

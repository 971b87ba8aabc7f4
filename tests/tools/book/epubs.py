"""EPUBs of a few pages, by zipfile."""

import zipfile
from collections.abc import Mapping
from pathlib import Path

CONTAINER = """<?xml version="1.0"?>
<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">
<rootfiles><rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>"""
OPF = """<?xml version="1.0"?>
<package xmlns="http://www.idpf.org/2007/opf" xmlns:dc="http://purl.org/dc/elements/1.1/" version="3.0">
<metadata><dc:title>{title}</dc:title><dc:creator>Ann Author</dc:creator><dc:language>{language}</dc:language>
<dc:date>2026-01-02</dc:date>{meta}</metadata>
<manifest>{manifest}</manifest><spine toc="ncx">{spine}</spine></package>"""
PAGE = """<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.1//EN" "http://www.w3.org/TR/xhtml11/DTD/xhtml11.dtd">
<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops">
<head><title/><style>p {{ color: red }}</style></head><body>{body}</body></html>"""


def page(body: str) -> str:
    return PAGE.format(body=body)


def nav(items: str) -> str:
    marks = f'<nav epub:type="landmarks"><ol>{link("one.xhtml", "Start")}</ol></nav>'
    return page(f'<nav epub:type="toc"><h1>Contents</h1><ol>{items}</ol></nav>{marks}')


def link(href: str, title: str, below: str = "") -> str:
    return f'<li><a href="{href}">{title}</a>{f"<ol>{below}</ol>" if below else ""}</li>'


def ncx(points: str) -> str:
    return f'<ncx xmlns="http://www.daisy.org/z3986/2005/ncx/"><navMap>{points}</navMap></ncx>'


def point(href: str, title: str, below: str = "") -> str:
    return f'<navPoint><navLabel><text>{title}</text></navLabel><content src="{href}"/>{below}</navPoint>'


def write_epub(
    file: Path, pages: Mapping[str, str | bytes], *, extra: Mapping[str, str | bytes] | None = None,
    title: str = "A Book", language: str = "en", meta: str = "", manifest: str = "",
    linear: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """`pages` of the spine by name; `nav.xhtml` and `toc.ncx` among `extra` are its navigation."""
    extra = extra or {}
    items = [f'<item id="p{at}" href="{name}" media-type="application/xhtml+xml"/>' for at, name in enumerate(pages)]
    if "OEBPS/nav.xhtml" in extra:
        items.append('<item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>')
    if "OEBPS/toc.ncx" in extra:
        items.append('<item id="ncx" href="toc.ncx" media-type="application/x-dtbncx+xml"/>')
    spine = [f'<itemref idref="p{at}" linear="{(linear or {}).get(name, "yes")}"/>' for at, name in enumerate(pages)]
    opf = OPF.format(
        title=title, language=language, meta=meta, manifest="".join(items) + manifest, spine="".join(spine)
    )
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mimetype", "application/epub+zip", zipfile.ZIP_STORED)
        archive.writestr("META-INF/container.xml", CONTAINER)
        archive.writestr("OEBPS/book.opf", opf)
        for name, content in pages.items():
            archive.writestr(f"OEBPS/{name}", content)
        for name, content in extra.items():
            archive.writestr(name, content)
    return file

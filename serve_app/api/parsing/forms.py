"""Parsing of forms: text fields and uploaded files."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from urllib.parse import parse_qsl

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from deployments.errors import InvalidRequest
from serve_app.api.parsing.client_input import MAX_BODY_BYTES, object_of, read_body
from serve_app.audio.clone_prompts import Preparation
from serve_app.audio.recordings import PREPARATIONS

_MOST_FIELDS, _MOST_FILES = 32, 16


@dataclass(frozen=True, slots=True)
class FormFile:
    """File uploaded in a form."""

    field: str
    name: str  # without folders
    data: bytes


@dataclass(frozen=True, slots=True)
class SentForm:
    """Fields of a form, and its files in upload order."""

    fields: dict[str, object]
    files: tuple[FormFile, ...] = ()

    def text(self, *names: str) -> str | None:
        """Return the first of these fields that is present and not empty. Raises InvalidRequest if the field is not
        text.
        """
        for name in names:
            value = self.fields.get(name)
            if value is not None and not isinstance(value, str):
                raise InvalidRequest(f"{name} must be a string.", name)
            if value:
                return value
        return None

    def required(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise InvalidRequest(f"{name} is required.", name, "missing_required_parameter")
        return value

    def preparation(self) -> Preparation:
        """Return the preparation that the form requests for its recordings. Raises InvalidRequest."""
        sent = self.text("prepare") or "auto"
        for preparation in PREPARATIONS:
            if sent == preparation:
                return preparation
        raise InvalidRequest(f"prepare: {sent[:40]!r} is unknown. Use one of: {', '.join(PREPARATIONS)}.", "prepare")

    def files_of(self, *fields: str) -> Sequence[FormFile]:
        return [file for file in self.files if file.field.removesuffix("[]") in fields]


async def read_form(request: Request) -> SentForm:
    """Read the body as a form or a JSON object. Raises InvalidRequest, PayloadTooLarge."""
    return await parse_form(request, await read_body(request))


async def parse_form(request: Request, content: bytes) -> SentForm:
    """Parse a multipart form, a URL-encoded form, or a JSON object. An empty body is an empty form. Raises
    InvalidRequest.
    """
    if not content:
        return SentForm({})
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/x-www-form-urlencoded":
        try:
            return SentForm(dict(parse_qsl(content.decode("utf-8", "replace"), max_num_fields=_MOST_FIELDS)))
        except ValueError as error:
            raise InvalidRequest(f"The form is invalid: {error}.", None, "invalid_form") from error
    if kind != "multipart/form-data":
        return SentForm(object_of(request, content))
    return await _multipart(content, request.headers)


async def _multipart(content: bytes, headers: Headers) -> SentForm:
    async def parts() -> AsyncGenerator[bytes, None]:
        yield content

    most = {"max_files": _MOST_FILES, "max_fields": _MOST_FIELDS, "max_part_size": MAX_BODY_BYTES}
    parser = MultiPartParser(headers, parts(), **most)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:
        raise InvalidRequest(f"The form is invalid: {error}.", None, "invalid_form") from error
    try:
        files = [(name, value) for name, value in form.multi_items() if isinstance(value, UploadFile)]
        return SentForm(
            {name: value for name, value in form.items() if isinstance(value, str)},
            tuple([FormFile(name, PurePath(file.filename or "").name, await file.read()) for name, file in files]),
        )
    finally:
        await form.close()

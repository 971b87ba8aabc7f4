"""Names of a request's fields: those of `/v1/audio/speech`, other servers' spellings of them, and other dialects'."""

import re
from collections.abc import Iterator, Mapping

from pydantic import AliasChoices

from deployments.errors import InvalidRequest
from serve_app.api.requests.speech_body import SpeechBody
from serve_app.text.languages import language_name

# A dialect's fields, fields of nested objects after a dot, and which field of a SpeechBody each becomes. None: it has
# another effect. "bit_rate" is no field of a SpeechBody, but treated as one.
Names = dict[str, str | None]

# tts-1-hd-zh: servers of Qwen3-TTS name the language with the model.
_WITH_LANGUAGE = re.compile(r"(tts-1(?:-hd)?)-([a-z]{2})")
_KOKORO_LANGUAGES = {"a": "en-US", "b": "en-GB", "e": "es", "f": "fr", "i": "it", "j": "ja", "p": "pt-BR", "z": "zh"}
# Of `/v1/audio/speech`.
SPEECH: Names = {
    str(choice): name
    for name, field in SpeechBody.model_fields.items()
    for choice in (field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else [name])
}
# With the spellings of Dify and Kokoro-FastAPI.
ALL_SPELLINGS: Names = {
    **SPEECH,
    "instruction": "instructions",
    "lang_code": "language",
    "ssml": None,
    "normalization_options": None,
}


def in_our_spelling(fields: Mapping[str, object]) -> dict[str, object]:
    """`fields` with our names in place of the names of other servers of this API. Raises InvalidRequest."""
    ours = dict(fields)
    if "instruction" in ours and "instructions" not in ours:  # Dify
        ours["instructions"] = ours.pop("instruction")
    code = ours.get("lang_code")
    if not isinstance(code, str | None):
        raise InvalidRequest("lang_code must be a string.", "lang_code")
    if code is not None and "language" not in ours:  # Kokoro-FastAPI
        ours["language"] = _KOKORO_LANGUAGES.get(code, code)
        del ours["lang_code"]
    if ours.get("ssml") is True and "markup" not in ours:  # Kokoro-FastAPI
        ours["markup"] = "ssml"
    options = ours.get("normalization_options")
    if isinstance(options, dict) and isinstance(options.get("normalize"), bool):  # Kokoro-FastAPI
        ours.setdefault("text_normalization", "on" if options["normalize"] else "off")
    model = ours.get("model")
    named = _WITH_LANGUAGE.fullmatch(model) if isinstance(model, str) else None
    if named and language_name(named[2]) != named[2]:
        ours["model"] = named[1]
        ours.setdefault("language", named[2])
    return ours


def flat(fields: Mapping[str, object], names: Names) -> dict[str, object]:
    """`fields` that were sent, with dotted names for fields of the nested objects that `names` knows. A null is an
    absent field, and so is an object of nothing else.
    """
    outer = {name[:end] for name in names for end, char in enumerate(name) if char == "."}
    return dict(_flat(fields, outer, ""))


def _flat(fields: Mapping[str, object], outer: set[str], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in fields.items():
        path = prefix + name.replace(".", "?")  # a dot of the client's own is no nesting
        if path in outer and isinstance(value, Mapping):
            yield from _flat(value, outer, f"{path}.")
        elif value is not None and not _is_all_null(value):
            yield path, value


def _is_all_null(value: object) -> bool:
    """Whether it is an object of nulls. An empty one is none: some clients switch a feature on with it."""
    return isinstance(value, Mapping) and bool(value) and all(each is None for each in value.values())


def renamed(sent: Mapping[str, object], names: Names) -> dict[str, object]:
    """The fields of a SpeechBody. Of two that mean the same the first in `names` counts."""
    return {ours: sent[theirs] for theirs, ours in reversed(names.items()) if ours is not None and theirs in sent}

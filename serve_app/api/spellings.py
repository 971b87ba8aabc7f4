"""Fields of `/v1/audio/speech` as other servers of this API spell them."""

import re
from collections.abc import Mapping

from deployments.errors import InvalidRequest
from serve_app.api import ignored_fields
from serve_app.speech.languages import language_name

# tts-1-hd-zh: servers of Qwen3-TTS name the language with the model.
_WITH_LANGUAGE = re.compile(r"(tts-1(?:-hd)?)-([a-z]{2})")
_KOKORO_LANGUAGES = {"a": "en-US", "b": "en-GB", "e": "es", "f": "fr", "i": "it", "j": "ja", "p": "pt-BR", "z": "zh"}
# Dify's and Kokoro-FastAPI's words are understood as well.
SPELLINGS: ignored_fields.Names = {
    **ignored_fields.SPEECH,
    "instruction": "instructions",
    "lang_code": "language",
    "ssml": None,
    "normalization_options": None,
}


def spelled(fields: Mapping[str, object]) -> dict[str, object]:
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

"""Names of other servers with OpenAI's route for fields of its body."""

import re
from collections.abc import Mapping
from typing import ClassVar

from deployments.errors import InvalidRequest
from serve_app.api.parsing.client_input import switch
from serve_app.api.resolve.ignored_fields import Reasons
from serve_app.api.resolve.resolver import RequestHooks
from serve_app.text.languages import language_name

# Qwen3-TTS servers append the language to the model name, as in tts-1-hd-zh.
_WITH_LANGUAGE = re.compile(r"(tts-1(?:-hd)?)-([a-z]{2})")
_KOKORO_LANGUAGES = {"a": "en-US", "b": "en-GB", "e": "es", "f": "fr", "i": "it", "j": "ja", "p": "pt-BR", "z": "zh"}


class SpellingHooks(RequestHooks):
    """Accepts other servers' names."""

    spellings: ClassVar = {
        "instruction": "instructions",
        "lang_code": "language",
        "ssml": None,
        "normalization_options": None,
    }

    def translate(self, fields: Mapping[str, object]) -> tuple[dict[str, object], Reasons]:
        ours, reasons = dict(fields), Reasons()
        if "instruction" in ours and "instructions" not in ours:  # Dify
            ours["instructions"] = ours.pop("instruction")
        code = ours.get("lang_code")
        if not isinstance(code, str | None):
            raise InvalidRequest("lang_code must be a string.", "lang_code")
        if code is not None and "language" not in ours:  # Kokoro-FastAPI
            ours["language"] = _KOKORO_LANGUAGES.get(code, code)
            del ours["lang_code"]
        if "ssml" in ours and switch(ours, "ssml") and "markup" not in ours:  # Kokoro-FastAPI
            ours["markup"] = "ssml"
        options = ours.get("normalization_options")
        if isinstance(options, dict):  # Kokoro-FastAPI
            if options.get("normalize") is not None:
                ours.setdefault("text_normalization", "on" if switch(options, "normalize") else "off")
            if set(options) - {"normalize"}:
                reasons["normalization_options"] = "only the option normalize has an effect"
        model = ours.get("model")
        named = _WITH_LANGUAGE.fullmatch(model) if isinstance(model, str) else None
        if named and language_name(named[2]) != named[2]:
            ours["model"] = named[1]
            ours.setdefault("language", named[2])
        return ours, reasons

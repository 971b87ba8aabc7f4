"""In which language a text is, by py3langid, whose model is inside the package."""

from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from deployments.errors import InvalidRequest
from serve_app.speech.languages import language_code

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

DETECT = "detect"  # as a client names it
EXTRA = "pip install 'talkray[text]'"
_LEAST_CONFIDENCE = 0.9  # docs/text.md has what it costs


def detected(text: str, languages: tuple[str, ...]) -> str | None:
    """The one of `languages` that `text` is in; None where this is not certain. The first call takes a second.

    Raises InvalidRequest where the package is missing.
    """
    codes = {code: name for name in languages if (code := language_code(name)) is not None}
    if len(codes) < 2:
        return None
    code, confidence = _identifier(tuple(codes)).classify(text)
    return codes[code] if confidence >= _LEAST_CONFIDENCE else None


@lru_cache
def _identifier(codes: tuple[str, ...]) -> "LanguageIdentifier":
    if find_spec("py3langid") is None:
        message = (
            f"language: to tell languages apart takes py3langid, not installed here: {EXTRA}, or name the language."
        )
        raise InvalidRequest(message, "language", "extra_not_installed")
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages(list(codes))
    return identifier

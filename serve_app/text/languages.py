"""Clients' language names, and language detection by letters and frequent words, or with py3langid."""

import re
import unicodedata
from collections import Counter
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from deployments.errors import InvalidRequest
from serve_app.distribution import pip_install
from serve_app.text.characters import letters

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

AUTO, DETECT = "auto", "detect"  # request values: let the model choose, or detect it from the text
_LEAST_CONFIDENCE = 0.9  # for the cost, see docs/text.md

# ISO 639-1 codes, then 639-2 and 639-3 codes. A region or script after the code, as in zh-CN, is ignored.
_CODES = {
    "zh": "chinese", "en": "english", "fr": "french", "de": "german", "it": "italian", "ja": "japanese",
    "ko": "korean", "pt": "portuguese", "ru": "russian", "es": "spanish",
    "zho": "chinese", "chi": "chinese", "cmn": "chinese", "eng": "english", "fra": "french", "fre": "french",
    "deu": "german", "ger": "german", "ita": "italian", "jpn": "japanese", "kor": "korean", "por": "portuguese",
    "rus": "russian", "spa": "spanish",
}  # fmt: skip
# Scripts besides Latin, which every voice can read.
_SCRIPTS = {
    "chinese": {"CJK"},
    "japanese": {"CJK", "HIRAGANA", "KATAKANA"},
    "korean": {"HANGUL", "CJK"},
    "russian": {"CYRILLIC"},
}
_SCRIPT_NAMES = {"CJK": "Chinese", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean"}
_LETTERS = ("Lu", "Ll", "Lt", "Lo")
# Frequent words other than names. A word is listed for each language that has it, and not at all if English has it.
_WORDS = {
    "english": "the and is of to that it you was for are with this have not be at i my we they your from there what he "
    "she her his our has had will would can could do does did please how who where when why which but or if so",
    "french": "et est un une des les du en se si le non que qui dans vous je nous avec sur ce cette mais il elle sont "
    "aux bonjour allez pas ne très fait suis êtes où quand merci beaucoup oui cet ces leur votre notre "
    "mon ma mes ses jour aujourd'hui demain matin ici aussi tout tous deux jouent enfants c'est s'il à été déjà",
    "german": "der das es da des du sei und ist nicht ein eine ich mit auf für sie wir den dem zu auch wie sich aber "
    "guten geht ihnen wo wer einen einem einer vom zum zur bei nach vor sind haben habe wird werden weil dass wenn "
    "oder noch nur schon sehr mehr kann können müssen muss uns ihr ihre mein kein keine heute morgen danke bitte uhr "
    "möchte hallo diese dieser dieses jeden",
    "italian": "il di che è non le da se sono della gli anche questo questa più ma nel alla dei ciao stai sta "
    "buongiorno una un lo con quando grazie molto oggi domani hai abbiamo siamo sei del delle nella mio prego "
    "c'è buonasera si mi può nei ogni già",
    "portuguese": "os é um uma não para por da em se mais você está isso são muito ao na olá tudo bem bom dia este "
    "esta vamos que obrigado obrigada pela pelo ela ele nós meu minha hoje amanhã onde quando aqui também já foi "
    "estou fica pode meus às todas",
    "spanish": "es una que le lo si por para está muy pero los las en con este esta su un hola cómo estás buenos días "
    "del mi vamos mañana hoy dónde cuándo gracias muchas usted nosotros tengo tiene estoy más ya fue se puede "
    "llegó",
}
_FREQUENT = {language: frozenset(words.split()) for language, words in _WORDS.items()}
_KNOWN = _SCRIPTS.keys() | _FREQUENT.keys()  # languages with known scripts
_LEAST_WORDS, _LEAST_SHARE = 3, 0.2  # least distinct matches, and least share of the text's words
_GREEK_SIGN = re.compile(r"(?<![Ͱ-Ͽἀ-῿])[Ͱ-ϿΩµ]{1,2}(?![Ͱ-Ͽἀ-῿])")  # π, Δx, 5 Ω, 20 µm
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")


def language_name(tag: str) -> str:
    """Return the name that checkpoints use: "de", "DE", "de-AT" and "deu" become "german". Others are lowercased."""
    return _CODES.get(re.split("[-_]", tag.lower(), maxsplit=1)[0], tag.lower())


def spoken_language(tag: str, languages: tuple[str, ...], *, default: str | None) -> str | None:
    """Return the one of `languages` that `tag` names, AUTO or DETECT, or None for any other language. `default`
    replaces `tag` if it is one of `languages`.
    """
    language = language_name(default or "")
    language = language if language in languages else language_name(tag)
    return language if language in (AUTO, DETECT, *languages) else None


def has_region(tag: str) -> bool:
    """Return whether a code has a part that `language_name` ignores, such as "en-GB" or "zh-Hans"."""
    return re.split("[-_]", tag.lower(), maxsplit=1)[0] in _CODES and tag.lower() not in _CODES


def language_code(name: str) -> str | None:
    """Return the two-letter code for a language name that checkpoints use."""
    return next((code for code, known in _CODES.items() if known == name), None)


def foreign_language(text: str, languages: tuple[str, ...]) -> str | None:
    """Return the language or script of `text` if it is certain and not one of `languages`.

    Return None if the language is uncertain. Languages that are not listed in this module may use any script.
    """
    read = {"LATIN"}.union(*(_SCRIPTS.get(language, ()) for language in languages))
    has_known_scripts = bool(languages) and _KNOWN.issuperset(languages)
    scripts = _scripts(_GREEK_SIGN.sub("", text)) if has_known_scripts and not text.isascii() else Counter[str]()
    foreign = Counter({script: count for script, count in scripts.items() if script not in read})
    if foreign and foreign.total() * 2 > scripts.total():
        script = foreign.most_common(1)[0][0]
        return _SCRIPT_NAMES.get(script, f"{script.title()} letters")
    likely, matches, known, share = _likely(text, languages)
    is_clear = len(matches) >= _LEAST_WORDS and share >= _LEAST_SHARE and len(matches) > 2 * known
    return likely.title() if is_clear else None


def looks_foreign(text: str, languages: tuple[str, ...]) -> str | None:
    """Return a likely language of `text` other than `languages`, or None. One word, as in Las Vegas, is not enough."""
    likely, matches, known, share = _likely(text, languages)
    return likely.title() if len(matches) > max(known, 1) and share >= _LEAST_SHARE else None


def _likely(text: str, languages: tuple[str, ...]) -> tuple[str, set[str], int, float]:
    """Find the language outside `languages` with the most frequent words in `text`. Return the language, these words,
    the number of frequent words of the best of `languages`, and the share of these words in the text.
    """
    words = _WORD.findall(text.lower().replace("\u2019", "'"))
    different = set(words)
    known = max((len(different & _FREQUENT.get(language, frozenset())) for language in languages), default=0)
    candidates = [language for language in _FREQUENT if languages and language not in languages]
    likely = max(candidates, key=lambda language: len(different & _FREQUENT[language]), default="")
    matches = different & _FREQUENT.get(likely, frozenset())
    return likely, matches, known, sum(word in matches for word in words) / max(1, len(words))


def _scripts(text: str) -> Counter[str]:
    return Counter(_script(char) for char in letters(text) if unicodedata.category(char) in _LETTERS)


@lru_cache(maxsize=4096)
def _script(char: str) -> str:
    """Return the first word of the character's Unicode name: LATIN, CJK, CYRILLIC, ..."""
    return re.split("[ -]", unicodedata.name(char, "UNKNOWN"), maxsplit=1)[0]


def detected(text: str, languages: tuple[str, ...]) -> str | None:
    """Detect which of `languages` the text is in. Return None if uncertain. The first call takes a second.

    Raises InvalidRequest if py3langid is not installed.
    """
    codes = {code: name for name in languages if (code := language_code(name)) is not None}
    if len(codes) < 2:
        return None
    code, confidence = _identifier(tuple(codes)).classify(text)
    return codes[code] if confidence >= _LEAST_CONFIDENCE else None


@lru_cache
def _identifier(codes: tuple[str, ...]) -> "LanguageIdentifier":
    if find_spec("py3langid") is None:
        how = pip_install("py3langid")
        message = f"language: 'detect' needs py3langid, which is not installed: {how}, or set the language."
        raise InvalidRequest(message, "language", "extra_not_installed")
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages(list(codes))
    return identifier

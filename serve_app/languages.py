"""Languages as clients name them, and in which one a text is clearly written."""

import re
import unicodedata
from collections import Counter
from functools import lru_cache

# ISO 639-1, then 639-2 and 639-3; a region or script behind it, as in zh-CN, changes nothing.
_CODES = {
    "zh": "chinese", "en": "english", "fr": "french", "de": "german", "it": "italian", "ja": "japanese",
    "ko": "korean", "pt": "portuguese", "ru": "russian", "es": "spanish",
    "zho": "chinese", "chi": "chinese", "cmn": "chinese", "eng": "english", "fra": "french", "fre": "french",
    "deu": "german", "ger": "german", "ita": "italian", "jpn": "japanese", "kor": "korean", "por": "portuguese",
    "rus": "russian", "spa": "spanish",
}  # fmt: skip
# Languages that are written in Latin letters are not listed: every voice reads these.
_SCRIPTS = {
    "chinese": {"CJK"},
    "japanese": {"CJK", "HIRAGANA", "KATAKANA"},
    "korean": {"HANGUL", "CJK"},
    "russian": {"CYRILLIC"},
}
_SCRIPT_NAMES = {"CJK": "Chinese", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean"}
_LETTERS = ("Lu", "Ll", "Lt", "Lo")
# Frequent words that are no words of another one of these languages, and no names.
_WORDS = {
    "english": "the and is of to that it you was for are with this have not be at i my we they your from there what",
    "french": "et est une des les du que qui dans vous je nous avec sur ce cette mais il elle sont aux bonjour allez",
    "german": "der das und ist nicht ein eine ich mit auf für sie wir den dem zu auch wie sich aber guten geht ihnen",
    "italian": "il di che è per non sono della gli anche questo questa più ma nel alla dei ciao stai sta buongiorno",
    "portuguese": "os é um uma não para com do da em mais você está isso são muito ao na olá tudo bem bom dia",
    "spanish": "y es una que por para está muy pero los las en con este esta hay su un hola cómo estás buenos días",
}
_FREQUENT = {language: frozenset(words.split()) for language, words in _WORDS.items()}
_LEAST_WORDS, _LEAST_SHARE = 3, 0.2  # different ones, of the words of the text
_WORD = re.compile(r"[^\W\d_]+")


def language_name(given: str) -> str:
    """The name that checkpoints use: "de", "DE", "de-AT" and "deu" are "german". Others stay, in lower case."""
    return _CODES.get(re.split("[-_]", given.lower(), maxsplit=1)[0], given.lower())


def has_region(given: str) -> bool:
    """Whether there is more to a code than `language_name` understands, as in "en-GB" and "zh-Hans"."""
    return re.split("[-_]", given.lower(), maxsplit=1)[0] in _CODES and given.lower() not in _CODES


def language_code(name: str) -> str | None:
    """The code of two letters for a name that checkpoints use."""
    return next((code for code, known in _CODES.items() if known == name), None)


def foreign_letters(text: str, languages: tuple[str, ...]) -> Counter[str]:
    """How many letters of `text` are in which script, of scripts that none of `languages` is written in."""
    if text.isascii() or not languages:
        return Counter()
    read = {"LATIN"}.union(*(_SCRIPTS.get(language, ()) for language in languages))
    return Counter({script: count for script, count in _scripts(text).items() if script not in read})


def foreign_language(text: str, languages: tuple[str, ...]) -> str | None:
    """What `text` is clearly written in, where that is none of `languages`: a language, or the name of a script.

    None where nothing is clear, or no language is known of the voice.
    """
    foreign = foreign_letters(text, languages)
    if foreign and foreign.total() * 2 > _scripts(text).total():
        script = foreign.most_common(1)[0][0]
        return _SCRIPT_NAMES.get(script, f"{script.title()} letters")
    words = _WORD.findall(text.lower())
    different = set(words)
    known = max((len(different & _FREQUENT.get(language, frozenset())) for language in languages), default=0)
    others = [language for language in _FREQUENT if languages and language not in languages]
    likely = max(others, key=lambda language: len(different & _FREQUENT[language]), default=None)
    if likely is None:
        return None
    found = different & _FREQUENT[likely]
    is_clear = len(found) >= _LEAST_WORDS and sum(word in found for word in words) >= _LEAST_SHARE * len(words)
    return likely.title() if is_clear and len(found) > 2 * known else None


def _scripts(text: str) -> Counter[str]:
    """Letters of each script."""
    plain = unicodedata.normalize("NFKC", text)
    return Counter(_script(char) for char in plain if unicodedata.category(char) in _LETTERS)


@lru_cache(maxsize=4096)
def _script(char: str) -> str:
    """The first word of the character's name: LATIN, CJK, CYRILLIC, ..."""
    return re.split("[ -]", unicodedata.name(char, "UNKNOWN"), maxsplit=1)[0]

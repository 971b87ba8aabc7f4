"""Figures in words: hard lines of ten languages, whose readings were written down before any rule or library read them.

A line that is read in another way than any of its readings (apart by " | ") stays, and is marked as a miss.
docs/text.md has the counts. Upper and lower case, hyphens, 零 and 〇, and in Chinese, Japanese and Korean spaces make
no difference.

The lines in `neighbours/` are different: their readings are the rules' own, checked by reading them. They catch
changes, but do not measure accuracy.
"""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.errors import InvalidRequest
from serve_app.extensions.text import normalisation
from serve_app.extensions.text.lexicon import Lexicon
from serve_app.extensions.text.normalisation import LiveNormaliser, prepare
from serve_app.extensions.text.spoken_text import TextReader, TextRules, read
from serve_app.text.spoken import LEFT_OUT
from tests.processor_time import times_as_long

DATA = Path(__file__).parents[3] / "data" / "normalisation"
LANGUAGES = {
    "en": "english", "de": "german", "fr": "french", "es": "spanish", "it": "italian", "pt": "portuguese",
    "ru": "russian", "ko": "korean", "ja": "japanese", "zh": "chinese",
}  # fmt: skip
PIECES = [
    "0", "1", "12", "007", "1999", "3.5", "3,5", "1.234,56", "1,234.5", "-5", "%", "€", "$", "°C", "km/h", "m²", "XXI",
    "IV", "I", "a", "de", "1st", "2.", "3. Mai", "5 мая", "年", "月", "日", "時", "12:30", "99:99", "20/05/2024",
    "99/99/9999", "40.40.2024", "00.00.2000", "1/2", "0/0", "½", "²", "٣", "１２", " ", "\n", "\u3000", ",", ".",
    "-", "–", "&", "№", "§", "Dr.", "z. B.", "6월", "개", "시", "100", "'90", "R$", "14h30", "(", ")", "\u0301", "😀",
    "0" * 21, "1e5", "2-й", "100-го", "IIII", "0º", "0ª", "0e", "0-я", LEFT_OUT,
    "2024-11-05", "5. Nov. ", "lun.", "Mo.", "-Fr.", "пн", "-пт", "г. ", "Москва", "St. ", "Ulm", "str. ", "c/", "3:1",
    "M€", "S. ", "art. ", "14:00", "Mio. ", "24/7",
]  # fmt: skip


def lines(name: str) -> list[tuple[str, str, list[str], bool]]:
    """Language, text, readings, and whether a miss is known."""
    rows = [line.split("\t") for line in (DATA / name).read_text("utf-8").splitlines()]
    language = LANGUAGES[Path(name).stem]
    return [(language, row[0], row[1].split(" | "), row[2:] == ["miss"]) for row in rows]


ALL = [line for path in sorted(DATA.rglob("*.tsv")) for line in lines(str(path.relative_to(DATA)))]


def normalised(text: str, language: str) -> str:
    parts = LiveNormaliser(language).feed(text, is_last=True)
    assert "".join(part.written for part in parts) == text
    return "".join(part.spoken for part in parts)


def plain(text: str, language: str) -> str:
    joint = "" if language in ("chinese", "japanese", "korean") else " "
    return joint.join(text.casefold().replace("-", " ").replace("〇", "零").split())


@pytest.mark.parametrize(("language", "text", "readings", "is_missed"), ALL, ids=lambda value: str(value)[:40])
def test_hard_lines_are_read_as_written_down(language: str, text: str, readings: list[str], is_missed: bool) -> None:
    spoken = normalised(text, language)
    is_right = plain(spoken, language) in [plain(reading, language) for reading in readings]
    assert is_right is not is_missed, spoken


def test_each_language_misses_at_most_one_line_of_thirty() -> None:
    known = [lines(f"{code}.tsv") for code in LANGUAGES]
    assert {len(each) for each in known} == {30}
    assert {sum(is_missed for *_, is_missed in each) for each in known} == {0, 1}


def test_hard_lines_are_read_alike_letter_by_letter() -> None:
    for language, text, *_ in ALL:
        live = LiveNormaliser(language)
        parts = [part for letter in text for part in live.feed(letter, is_last=False)] + live.feed("", is_last=True)
        assert "".join(part.spoken for part in parts) == normalised(text, language)


@pytest.mark.parametrize("language", LANGUAGES.values())
@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES), max_size=25).map("".join), size=st.integers(1, 9))
def test_wherever_a_text_is_cut_the_same_is_spoken(language: str, text: str, size: int) -> None:
    live = LiveNormaliser(language)
    parts = [part for at in range(0, len(text), size) for part in live.feed(text[at : at + size], is_last=False)]
    parts += live.feed("", is_last=True)
    assert "".join(part.written for part in parts) == text
    assert "".join(part.spoken for part in parts) == normalised(text, language)


@pytest.mark.parametrize("language", LANGUAGES.values())
def test_the_time_of_a_text_grows_with_its_length(language: str) -> None:
    prepare(language)

    normalise = partial(normalised, language=language)
    for pattern in ("1", "1 ", "- ", "a ", "12:30 € ", " ", ".", "Mo.-", "S. 1-", "1,-", "5 nov. ", "a str. "):
        assert times_as_long(normalise, pattern, short=1 << 9, long=1 << 12, limit=16) <= 16, pattern


def test_what_is_far_from_figures_stays_as_it_is() -> None:
    text = "“Très bien”, dit-il — puis rien (du tout). Et encore : rien…"
    assert normalised(text, "french") == text


def test_words_lead_back_to_the_text_as_it_was_written() -> None:
    parts = LiveNormaliser("german").feed("Es kostet 12,50 €, sagt er.", is_last=True)
    assert ("12,50 €", "zwölf Euro fünfzig") in [(part.written, part.spoken) for part in parts]
    assert normalised("200000000000000", "german") == "zweihundert Billionen"
    assert normalised("2000000000000000", "german") == "zwei" + 15 * " null"


def test_it_is_a_stage_of_the_pipeline_after_the_lexicon() -> None:
    rules = TextRules("auto", lexicon=Lexicon({"iPhone 15": "das neue Telefon"}), normalised="german")
    sent = "**Um 8:05** kam das iPhone 15 für 800 €."
    assert read(sent, rules).text == "Um acht Uhr fünf kam das das neue Telefon für achthundert Euro."
    reader = TextReader(rules)
    pieces = [piece for char in sent for piece in reader.feed(char, is_last=False)] + reader.feed("", is_last=True)
    assert "".join(piece.spoken for piece in pieces) == read(sent, rules).text
    assert "".join(piece.written for piece in pieces).replace(LEFT_OUT, "") == sent.replace("**", "")


def test_a_language_without_its_package_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    normalisation._reader.cache_clear()
    monkeypatch.setattr(normalisation, "find_spec", lambda name: None if name == "wetext" else find_spec(name))
    with pytest.raises(InvalidRequest, match=r"Chinese requires the package wetext.*pip install 'wetext>=") as error:
        prepare("chinese")
    assert error.value.param == "text_normalization"
    prepare("german")

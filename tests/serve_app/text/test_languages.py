from pathlib import Path

import pytest

from deployments.errors import InvalidRequest
from serve_app.text import languages
from serve_app.text.languages import detected, foreign_language, language_name, looks_foreign

ENGLISH = ("english",)
RELEASED = (
    "chinese", "english", "french", "german", "italian", "japanese", "korean", "portuguese", "russian", "spanish",
)  # fmt: skip
TEXTS = (Path(__file__).parents[3] / "loadtest" / "texts.txt").read_text(encoding="utf-8").splitlines()
SPOKEN = {
    "french": "Je ne sais pas ce que vous avez dans la tête, mais elle est avec nous.",
    "german": "Der Zug ist nicht pünktlich, und wir warten auf den Anschluss.",
    "italian": "Non è vero che gli amici sono della città, ma anche questo è bello.",
    "portuguese": "Você não está em casa, mas isso é muito bom para uma pessoa.",
    "spanish": "Hay una casa que está en el campo, pero es muy grande y con jardín.",
}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *(("de", "german"), ("DE-at", "german"), ("zh_Hant_TW", "chinese"), ("jpn", "japanese"), ("Auto", "auto")),
        *(("English", "english"), ("beijing_dialect", "beijing_dialect"), ("nl", "nl"), ("", "")),
    ],
)
def test_names_and_codes(given: str, name: str) -> None:
    assert language_name(given) == name


@pytest.mark.parametrize(("language", "text"), SPOKEN.items())
def test_a_language_is_told_by_its_frequent_words(language: str, text: str) -> None:
    assert foreign_language(text, ENGLISH) == language.title()
    assert foreign_language(text, (*ENGLISH, language)) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Guten Tag, wie geht es Ihnen?", "German"),
        ("Bonjour, comment allez-vous ?", "French"),
        ("Hola, ¿cómo estás?", "Spanish"),
        ("Olá, tudo bem?", "Portuguese"),
        ("Ciao, come sta? Buongiorno!", "Italian"),
        ("Hallo, heute nur du.", "German"),
        ("Der Zug nach Berlin fährt um zehn Uhr ab, und wir müssen uns beeilen, weil die Straßen voll sind.", "German"),
        ("Wo ist der Bahnhof?", "German"),
        ("Quel jour sommes-nous aujourd'hui ?", "French"),
        ("Je voudrais réserver une table pour deux personnes ce soir.", "French"),
        ("Les enfants jouent dehors.", "French"),
        ("Allez le chercher, s'il pleut pas.", "French"),
        ("Buongiorno, c'è una camera? Prego!", "Italian"),
        ("Que dia! Pode ver meus livros?", "Portuguese"),
        ("Se puede ver días del mes.", "Spanish"),
        ("Muchas gracias por todo.", "Spanish"),
    ],
)
def test_a_language_is_told_by_its_greetings_and_plain_sentences(text: str, name: str) -> None:
    assert foreign_language(text, ENGLISH) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Guten Morgen!", "German"), ("Ein Hund bellt sehr laut.", "German"), ("Merci beaucoup.", "French"),
        ("El tren sale mañana a las ocho.", "Spanish"), ("Obrigado pela ajuda.", "Portuguese"),
    ],
)  # fmt: skip
def test_what_is_not_clear_looks_foreign(text: str, name: str) -> None:
    assert foreign_language(text, ENGLISH) is None
    assert looks_foreign(text, ENGLISH) == name
    assert looks_foreign(text, RELEASED) is None


_ENGLISH = (
    "Is there a hat shop near the hotel?", "", "42", "x y", "UN troops left.", "Ho ho ho!", "ha ha", "LA, baby.",
    "example.com", "Ninety miles per hour.", "Come here, Anna.", "Hay fever, soy milk.", "Im fine", "Al left early.",
    "Los Angeles", "Las Vegas.", "No comment.", "Pour tea.", "Mia sings.", "Todo list", "Des Moines", "Hola, Anna!",
)  # fmt: skip


@pytest.mark.parametrize("text", [*TEXTS, *_ENGLISH])
def test_english_does_not_look_foreign(text: str) -> None:
    assert looks_foreign(text, ENGLISH) is None


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Es waren tausendzweihundertvierunddreißig Leute da.", "german"), ("Es regnet stark.", "german"),
        ("Sei leise, des Nachbarn wegen.", "german"), ("Un homme se lève.", "french"), ("La rue en pente.", "french"),
        ("Se vogliamo, da domani.", "italian"), ("Este livro se vende por dez reais.", "portuguese"),
        ("Si llueve, lo vemos en casa.", "spanish"),
    ],
)  # fmt: skip
def test_words_of_several_languages_do_not_look_foreign(text: str, language: str) -> None:
    assert looks_foreign(text, ("english", language)) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("今天天气很好。", "Chinese"),
        ("こんにちは。", "Japanese"),
        ("안녕하세요.", "Korean"),
        ("Привет!", "Cyrillic letters"),
        ("Καλημέρα σας, π = 3", "Greek letters"),
        ("مرحبا بالعالم", "Arabic letters"),
    ],
)
def test_a_script_is_told_by_its_letters(text: str, name: str) -> None:
    assert foreign_language(text, ENGLISH) == name
    is_released = name not in ("Greek letters", "Arabic letters")
    assert foreign_language(text, RELEASED) == (None if is_released else name)


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("greek", "Καλημέρα σας."), ("hindi", "नमस्ते दुनिया"), ("arabic", "مرحبا بالعالم"), ("urdu", "سلام دنیا"),
        ("thai", "สวัสดีชาวโลก"), ("hebrew", "שלום עולם"), ("ukrainian", "Добрий день"), ("cantonese", "你好世界"),
    ],
)  # fmt: skip
def test_a_language_that_is_unknown_here_may_have_any_script(language: str, text: str) -> None:
    assert foreign_language(text, ENGLISH) is not None
    assert foreign_language(text, (*ENGLISH, language)) is None
    assert foreign_language("Der Hund ist nicht mit uns auf dem Berg.", (*ENGLISH, language)) == "German"


@pytest.mark.parametrize(
    "text",
    [
        *TEXTS,
        "", "42", "🙂", "Die, die, die, my darling.", "La la la la.", "Los Angeles, El Paso and Las Vegas",
        "ｆｕｌｌ ｗｉｄｔｈ", "The word 今天 means today.", "𝐁𝐨𝐥𝐝 text, 1 µm, ½",
        "She said: “Das ist nicht gut”, and that was the end of it.",
        "5 Ω", "π ≈ 3.14", "λ = 5", "5 µ", "α = β", "Δx",
        "Café, naïve, Zürich, São Paulo", "E = mc², α and β are angles of the triangle",
    ],
)  # fmt: skip
def test_english_is_let_through(text: str) -> None:
    assert foreign_language(text, ENGLISH) is None


@pytest.mark.parametrize("text", [*SPOKEN.values(), "今天天气很好。", TEXTS[0]])
def test_a_voice_of_which_no_language_is_known_is_let_try(text: str) -> None:
    assert foreign_language(text, ()) is None


def test_short_lines_are_told_apart_or_left_open() -> None:
    lines = (Path(__file__).parents[2] / "data/languages/lines.tsv").read_text("utf-8").splitlines()
    found = [(name, detected(text, RELEASED)) for name, text in (line.split("\t") for line in lines)]
    assert len(found) == 200
    certain = [(name, guess) for name, guess in found if guess is not None]
    assert all(name == guess for name, guess in certain)
    document = (Path(__file__).parents[3] / "docs" / "text.md").read_text("utf-8")
    assert f"the language of {len(certain)} of 200 lines" in " ".join(document.split())


@pytest.mark.parametrize(
    ("text", "languages"),
    [
        *((text, RELEASED) for text in ("", "12:30", "OK", "http://x.y/z", "Berlin", "😀")),
        ("Das Treffen wurde auf Donnerstag verschoben.", ENGLISH),  # a single language is no finding
    ],
)
def test_a_text_of_no_certain_language(text: str, languages: tuple[str, ...]) -> None:
    assert detected(text, languages) is None


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    languages._identifier.cache_clear()
    monkeypatch.setattr(languages, "find_spec", lambda _: None)
    with pytest.raises(InvalidRequest, match=r"pip install 'py3langid>=") as error:
        detected("Hello there.", RELEASED)
    assert error.value.param == "language"

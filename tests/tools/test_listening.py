"""Texts, words and tables of `make listen`; the recognisers themselves hear in tests/e2e/test_listening.py."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serve_app.text.languages import language_code
from talkray_tools import job_client
from talkray_tools.judge import Judged
from talkray_tools.listening_session import Log
from talkray_tools.recogniser import pieces, plain_words, word_errors
from talkray_tools.released import read
from talkray_tools.spoken_texts import SENTENCES
from talkray_tools.ways import PLAIN, RATE, WAYS, UtteranceFailed
from tests.e2e.heard import begins_with_hiss, steps_where_joined
from tests.tools.book.fake_jobs import CHAR_S, running_jobs, tone
from tools.listening.__main__ import read_aloud
from tools.listening.table import not_come, table, worse
from tools.listening.texts import texts

NAME = "Some recogniser"


def judged(way: str, errors: int, compared: int | None = None, *, number: int = 0, failed: str = "") -> Judged:
    same = {} if compared is None else {NAME: compared}
    return Judged(
        way, "nora", SENTENCES, number, 100, {NAME: errors}, same, ends=1, seconds=40, opinion=3, failed=failed
    )


@pytest.mark.parametrize(
    "language", ["english", *sorted({*read("1.7B-CustomVoice")["talker_config"]["codec_language_id"]})]
)
def test_every_language_of_the_models_has_texts_and_a_recogniser(language: str) -> None:
    if language.endswith("_dialect"):
        return
    said = texts(language)
    assert language_code(language)
    assert len([text for text in said if text.kind == SENTENCES]) >= 8
    assert all(plain_words(text.spoken, language) for text in said)


def test_a_language_without_texts_is_refused() -> None:
    with pytest.raises(SystemExit, match="Use --texts, or one of: english"):
        texts("latin")


def test_texts_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("german:\n  numbers:\n    - {written: 3 Uhr, spoken: drei Uhr}\n", encoding="utf-8")
    [text] = texts("german", file)
    assert (text.kind, text.written, text.spoken) == ("numbers", "3 Uhr", "drei Uhr")


@pytest.mark.parametrize(("text", "language", "words"), [
    ("It's 10:30, Mr. Smith!", "english", "its ten thirty mister smith"),
    ("On the 3rd of May, 1,250 people.", "english", "on the third of may one thousand two hundred fifty people"),
    ("Größe, die ZÄHLT.", "german", "grösse die zählt"), ("Ещё раз", "russian", "еще раз"),
    ("今天, 好。", "chinese", "今 天 好"),
])  # fmt: skip
def test_words_as_they_sound(text: str, language: str, words: str) -> None:
    assert plain_words(text, language) == words.split()


def test_word_errors() -> None:
    assert word_errors(["a", "b", "c"], ["a", "c"]) == 1
    assert word_errors(["home", "stretch"], ["homestretch"]) == 0
    assert word_errors(["a", "b"], []) == 2


def test_a_way_may_be_a_point_above_the_same_pcm() -> None:
    heard = [judged("plain PCM", 50)]
    heard += [judged(way, 10 + more, 10, number=each) for way, more in (("mp3", 1), ("opus", 2)) for each in range(5)]
    [line] = worse(heard, NAME)
    assert line.startswith("opus: 12.0 %")


@pytest.mark.parametrize(
    ("differences", "is_worse"),
    [([1], False), ([1, 1, 2], False), ([1, 1, -1, 1, 1], False), ([1] * 5, True), ([1] * 9 + [-1] * 3, False)],
)
def test_what_chance_may_be_is_not_worse(differences: list[int], is_worse: bool) -> None:
    few = [replace(judged("opus", 4 + each, 4, number=at), words=7) for at, each in enumerate(differences)]
    assert [line.split(":")[0] for line in worse(few, NAME)] == ["opus"] * is_worse


def test_text_that_trails_the_speech_is_compared_with_such_speech() -> None:
    names = {way.name for way in WAYS if way.same_speech is not PLAIN.listen}
    assert len(names) == 4
    assert all("text" in name or "interruption" in name for name in names)


def test_the_table_has_a_row_for_each_way_and_names_what_did_not_come() -> None:
    heard = [judged("plain PCM", 4), judged("mp3", 100, failed="HTTP 500"), judged("mp3", 2, 3, number=1)]
    written = table(heard, [NAME], "X")
    assert "| plain PCM | nora | sentences | 1 | 100 | 4.0 % |  | 50 % | 2.50 | 3.00 |" in written
    assert "| mp3 | nora | sentences | 2 | 200 | 51.0 % |" in written
    assert "No audio: mp3, nora, sentences 0: HTTP 500" in written
    assert not_come(heard) == ["No audio: mp3, nora, sentences 0: HTTP 500"]


def test_a_kind_of_hard_texts_is_one_row_for_all_voices() -> None:
    names = [replace(judged("plain PCM", errors), voice=voice, kind="names") for voice, errors in (("a", 2), ("b", 4))]
    assert "| plain PCM | all | names | 2 | 200 | 3.0 % |" in table(names, [NAME], "X")


def test_a_run_goes_on_where_it_was_and_tries_again_what_failed(tmp_path: Path) -> None:
    log = Log(tmp_path / "heard.jsonl")
    log.add(judged("mp3", 1, 1))
    log.add(judged("mp3", 100, number=1, failed="HTTP 500"))
    with (tmp_path / "heard.jsonl").open("a") as file:
        file.write('{"way": "mp3", "vo')  # it was killed
    again = Log(tmp_path / "heard.jsonl")
    assert [each.key for each in again.judged] == [("mp3", "nora", SENTENCES, 0)]
    assert not again.has(("mp3", "nora", SENTENCES, 1))


def test_long_audio_is_cut_where_it_is_quiet() -> None:
    rate = 1000
    audio = np.ones(70 * rate, np.float32)
    audio[20 * rate : 21 * rate] = audio[45 * rate : 46 * rate] = 0
    parts = pieces(audio, rate)
    ends = np.cumsum([len(part) for part in parts])
    assert len(parts) == 3
    assert all(audio[end] == 0 for end in ends[:-1])
    assert np.array_equal(np.concatenate(parts), audio)
    assert len(pieces(audio[: 30 * rate], rate)) == 1


def test_a_hiss_at_the_beginning_is_seen() -> None:
    random, rate = np.random.default_rng(1), 24000
    hiss = (random.standard_normal(rate) * 1000).astype(np.int16)
    hum = (8000 * np.sin(2 * np.pi * 200 * np.arange(rate) / rate)).astype(np.int16)
    assert begins_with_hiss(hiss, rate)
    assert not begins_with_hiss(hum, rate)


def test_steps_are_seen_where_audio_is_joined() -> None:
    hum = (8000 * np.sin(2 * np.pi * 200 * np.arange(1200) / 24000)).astype(np.int16)
    assert steps_where_joined(hum, (600,)) == []
    assert steps_where_joined(np.concatenate([hum[:600], hum[630:]]), (600,)) == [600]


def test_the_paragraphs_of_a_book_are_cut_out_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_client, "_PERIOD_S", 0.01)
    said = ["The first one.", "Another one, which is longer.", "Last."]
    with running_jobs() as jobs:
        spoken = read_aloud(said, tmp_path, url=jobs.url, voice="alloy", language="english", seed=7)
        assert [len(audio) for audio in spoken] == pytest.approx([CHAR_S * RATE * len(text) for text in said], abs=25)
        for text, audio in zip(said, spoken, strict=True):
            assert np.abs(audio[100:-100] - tone(text, 7, 0.1)[100 : len(audio) - 100]).max() < 0.05
        assert read_aloud(said, tmp_path, url=jobs.url, voice="alloy", language="english", seed=7)[0].size
        assert jobs.num_begun == 1
        with pytest.raises(UtteranceFailed, match="no text to speak"):
            read_aloud(["..."], tmp_path, url=jobs.url, voice="alloy", language="english", seed=7)

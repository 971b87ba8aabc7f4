"""`talkray book` and `talkray dataset` against a server of jobs: what they write, and that they go on."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile

from deployments.errors import InvalidRequest
from talkray_tools import dataset, job_client
from talkray_tools.arguments import run_command
from talkray_tools.book import __main__ as command
from talkray_tools.book.assembly import Sound, gains
from tests.tools.book import epubs
from tests.tools.book.fake_jobs import CHAR_S, RATE, FakeJobs, running_jobs

TEXT = """Chapter 1

It was a dark and stormy night. The rain fell in torrents!

[Bob]: Who is there?

Nobody answered.

Chapter 2

Morning came, and with it the post.
"""
PARTS = [line for line in TEXT.replace("[Bob]: ", "").split("\n") if line]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJobs]:
    monkeypatch.setattr(job_client, "_PERIOD_S", 0.01)
    monkeypatch.setattr(job_client, "_PAUSE_S", 0.01)
    with running_jobs() as fake:
        yield fake


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "night.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def run_book(file: Path, *arguments: str) -> int:
    return run_command(command.book, "talkray book", [str(file), *arguments])


def make(fake: FakeJobs, file: Path, *arguments: str) -> int:
    return run_book(file, "--url", fake.url, "--voice-of", "Bob=bob", *arguments)


def starts() -> tuple[float, float]:
    """Of the second chapter, and the end, in seconds."""
    lengths = [CHAR_S * len(part) for part in PARTS]
    second = sum(lengths[:4]) + 0.9 + 0.3 + 0.3 + 2.0
    return second, second + lengths[4] + 0.9 + lengths[5]


def picture() -> bytes:
    frame = av.VideoFrame.from_ndarray(np.full((40, 30, 3), 120, np.uint8), format="rgb24")
    codec = av.CodecContext.create("png", "w")
    codec.width, codec.height, codec.pix_fmt = 30, 40, "rgb24"
    codec.time_base = 1
    return b"".join(bytes(packet) for packet in [*codec.encode(frame), *codec.encode(None)])


@pytest.mark.parametrize(
    ("suffix", "has_chapters", "has_cover"),
    [("m4b", True, True), ("mp3", True, True), ("opus", True, True), ("flac", False, True), ("wav", False, False)],
)
def test_formats(fake: FakeJobs, file: Path, suffix: str, has_chapters: bool, has_cover: bool) -> None:
    cover, out = file.with_name("cover.png"), file.with_name(f"out.{suffix}")
    cover.write_bytes(picture())
    arguments = ("-o", str(out), "--captions", "srt", "--cover", str(cover), "--author", "Ann", "--title", "Night")
    assert make(fake, file, *arguments) == 0
    second_s, end_s = starts()
    with av.open(str(out)) as opened:
        tags = dict(opened.metadata) | dict(opened.streams.audio[0].metadata)
        chapters = [(each["metadata"]["title"], float(each["start"] * each["time_base"])) for each in opened.chapters()]
        pictures = list(opened.streams.video)
        heard = np.concatenate([frame.to_ndarray().ravel() for frame in opened.decode(audio=0)])
    tags = {name.lower(): value for name, value in tags.items()}
    assert heard.size / (48000 if suffix == "opus" else RATE) == pytest.approx(end_s, abs=0.2)
    if has_chapters:
        assert chapters == [("Chapter 1", 0.0), ("Chapter 2", pytest.approx(second_s, abs=0.2))]
    assert bool(pictures) == has_cover
    if suffix != "wav":
        assert (tags["title"], tags["artist"], tags["genre"]) == ("Night", "Ann", "Audiobook")
    assert "trainedAlgorithmicMedia" in tags["comment"]
    report = json.loads(out.with_suffix(".report.json").read_text())
    assert [each["start_s"] for each in report["chapters"]] == [0, pytest.approx(second_s, abs=0.001)]
    captions = out.with_suffix(".srt").read_text()
    assert f"00:00:{second_s:06.3f}".replace(".", ",")[:-1] in captions


def test_chapters_begin_where_they_are_heard(fake: FakeJobs, file: Path) -> None:
    """The second chapter's tone begins within 0.2 s of its mark, in the decoded m4b."""
    out = file.with_suffix(".m4b")
    make(fake, file)
    with av.open(str(out)) as opened:
        heard = np.concatenate([frame.to_ndarray().ravel() for frame in opened.decode(audio=0)])
        marked_s = float(opened.chapters()[1]["start"] / 1000)
    around = np.abs(heard[round((marked_s - 1) * RATE) : round((marked_s + 0.5) * RATE)])
    assert np.flatnonzero(around > 0.02)[0] / RATE - 1 == pytest.approx(0, abs=0.2)


def test_voices_are_brought_to_one_loudness(fake: FakeJobs, file: Path) -> None:
    out = file.with_suffix(".wav")
    make(fake, file, "-o", str(out))
    before, _ = soundfile.read(out)
    make(fake, file, "-o", str(out), "--loudness", "-18")
    after, _ = soundfile.read(out)
    assert after.size == before.size
    bob_s = sum(CHAR_S * len(part) for part in PARTS[:2]) + 0.9 + 0.3 + 0.1
    bob, narrator = (slice(round(at * RATE), round((at + 0.15) * RATE)) for at in (bob_s, CHAR_S * 9 + 1.1))
    assert before[narrator].std() / before[bob].std() == pytest.approx(5, rel=0.05)
    assert after[narrator].std() / after[bob].std() == pytest.approx(1, rel=0.1)
    assert np.abs(after).max() <= 0.85
    whole = gains([Sound(out, "all", pause_s=0.0, chapter=0)], -18.0)["all"]
    assert 20 * np.log10(whole) == pytest.approx(0, abs=0.5), "as EBU R128 measures a whole programme"


def test_an_epub_with_estimated_times(fake: FakeJobs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.estimated = True
    fake.problems = {"He spoke.": {"finish_reason": "loop", "redrawn": True}}
    pages = {
        "a.xhtml": epubs.page("<h1>One</h1><p>It rained. We waited!</p>"),
        "b.xhtml": epubs.page("<h1>Two</h1><p>He spoke.</p>"),
    }
    file = epubs.write_epub(tmp_path / "a.epub", pages)
    assert run_command(command.book, "talkray book", [str(file), "--url", fake.url, "--captions", "vtt"]) == 0
    lines = (tmp_path / "a.vtt").read_text().split("\n")
    assert [line for line in lines if line and "-->" not in line] == [
        "WEBVTT", "One", "It rained.", "We waited!", "Two", "He spoke.",
    ]  # fmt: skip
    report = json.loads((tmp_path / "a.report.json").read_text())
    two_s = CHAR_S * (3 + 21) + 0.9 + 2.0
    assert report["chapters"][1] == {"title": "Two", "start_s": pytest.approx(two_s, abs=0.001)}
    problem = report["problems"][0]
    assert (problem["chapter"], problem["text"], problem["finish_reason"]) == ("Two", "He spoke.", "loop")
    assert problem["start_s"] == pytest.approx(two_s + 3 * CHAR_S + 0.9, abs=0.01)
    told = capsys.readouterr().out
    assert "listen at 0:04 (Two): loop, drawn again: He spoke." in told
    assert "A Book by Ann Author: 2 chapters, 36 characters" in told
    assert "speaking: 4 of 4 parts" in told


SUBTITLES = (
    "1\n00:00:01,000 --> 00:00:02,000\nOne two three.\n\n2\n00:00:02,000 --> 00:00:02,200\nMuch too long here.\n"
)


def test_subtitles_at_their_times(fake: FakeJobs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second cue has 0.2 s for 0.38 s of speech."""
    file, out = tmp_path / "film.srt", tmp_path / "film.wav"
    file.write_bytes(b"\xef\xbb\xbf" + SUBTITLES.replace("\n", "\r\n").encode())
    arguments = [str(file), "--url", fake.url, "--timed", "-o", str(out), "--captions"]
    with pytest.raises(InvalidRequest, match="--captions would overwrite"):
        run_command(command.book, "talkray book", [*arguments, "srt"])
    assert run_command(command.book, "talkray book", [*arguments, "vtt"]) == 0
    assert fake.spoken == ["One two three.", "Much too long here."]
    audio, rate = soundfile.read(out)
    heard = np.flatnonzero(np.abs(audio) > 0.01) / rate
    assert (heard[0], heard[-1]) == (pytest.approx(1.0, abs=0.01), pytest.approx(2 + 0.38 / 1.3, abs=0.03))
    assert heard[heard > 1.5][0] == pytest.approx(2.0, abs=0.01)
    assert "cue 2 (line 6): 0.1 s too long at 1.3x" in capsys.readouterr().out
    report = json.loads(out.with_suffix(".report.json").read_text())
    assert [each["cue"] for each in report["unfit_cues"]] == ["cue 2 (line 6)"]
    assert "00:00:02.000 --> 00:00:02.2" in out.with_suffix(".vtt").read_text()


@pytest.mark.parametrize(("name", "content", "told"), [
    ("a.srt", SUBTITLES, "1 chapters, 33 characters"), ("a.txt", SUBTITLES, "1 chapters, 33 characters"),
    ("a.txt", "Caf\xe9.", "note: a.txt is not UTF-8 and was read as windows-1252"),
    ("a.ass", "[Script Info]", "convert the file to SubRip (.srt)"),
    ("a.fb2", "<x/>", "convert the file to EPUB"), ("a.md", "# A\nx.", "1 chapters, 3 characters"),
])  # fmt: skip
def test_kinds_of_files(name: str, content: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text(content, encoding="cp1252")
    said = ""
    try:
        run_book(tmp_path / name, "--show")
    except InvalidRequest as refused:
        said = refused.message
    assert told in said + capsys.readouterr().out


def test_a_stopped_command_goes_on(fake: FakeJobs, file: Path) -> None:
    """Ctrl-C after three of six parts: the second run fetches the other three of the same job."""
    fake.stops_after = 3
    path = os.pathsep.join(["tools", "."])
    arguments = [str(file), "--url", fake.url, "--voice-of", "Bob=bob"]
    running = subprocess.Popen(
        [sys.executable, "-m", "talkray_tools.book", *arguments], env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None
    for line in running.stdout:
        if "speaking: 3 of 6 parts" in line:
            break
    running.send_signal(signal.SIGINT)
    assert "stopped: run the same command again to resume" in running.communicate()[0]
    assert running.returncode == 130
    assert fake.spoken == PARTS[:3]
    fake.stops_after = None
    assert make(fake, file) == 0
    assert (fake.spoken, fake.num_begun) == (PARTS, 1)
    assert fake.jobs == {}  # deleted when all of it was fetched


def test_a_change_speaks_what_changed(fake: FakeJobs, file: Path) -> None:
    make(fake, file)
    fake.spoken.clear()
    file.write_text(TEXT.replace("Nobody answered.", "Somebody answered.\n\nChapter 1"), encoding="utf-8")
    make(fake, file)
    assert fake.spoken == ["Somebody answered.", "Chapter 1"]


def test_a_job_of_what_is_not_wanted_any_more_is_deleted(fake: FakeJobs, file: Path) -> None:
    folder = job_client.PartFolder(file.with_suffix(".parts"))
    folder.folder.mkdir()
    old = job_client.PartList({}, [{"input": "Old."}])
    fake.status = "failed"
    with pytest.raises(job_client.JobFailed):
        job_client.fetch(fake.url, old, folder, lambda made: None)
    fake.status = "running"
    assert make(fake, file) == 0
    assert "DELETE /v1/audio/jobs/job_1" in fake.asked


def test_a_forgotten_job_is_made_again_without_what_was_fetched(fake: FakeJobs, file: Path) -> None:
    fake.stops_after, fake.status = 4, "running"
    folder = job_client.PartFolder(file.with_suffix(".parts"))
    work = job_client.PartList({}, [{"input": part} for part in PARTS])
    folder.folder.mkdir()

    def give_up(made: job_client.JobProgress) -> None:
        if made.parts == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job_client.fetch(fake.url, work, folder, give_up)
    fake.jobs.clear()
    fake.stops_after = None
    job_client.fetch(fake.url, work, folder, lambda made: None)
    assert sorted(fake.spoken) == sorted(PARTS)
    assert all(folder.has(name, digest) for name, digest in zip(work.names, work.digests, strict=True))


def test_a_failed_job_says_why_and_is_resumed(fake: FakeJobs, file: Path) -> None:
    fake.status = "failed"
    with pytest.raises(job_client.JobFailed, match=r"6 parts are missing \(the disk is full\). Run the command again"):
        make(fake, file)
    assert make(fake, file) == 0
    assert "POST /v1/audio/jobs/job_1/resume" in fake.asked


def test_what_the_server_ignores_is_told(fake: FakeJobs, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.ignored = "instructions (the model follows none)"
    assert make(fake, file, "--instructions", "Whisper.") == 0
    assert "the server ignored instructions (the model follows none)" in capsys.readouterr().out


def test_an_outage_is_waited_for(fake: FakeJobs, file: Path) -> None:
    fake.outages = 3
    assert make(fake, file) == 0


def test_many_parts_are_several_jobs(fake: FakeJobs, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_client, "_MOST_PARTS", 4)
    assert make(fake, file) == 0
    assert (fake.num_begun, fake.spoken) == (2, PARTS)


@pytest.mark.parametrize(("arguments", "told"), [
    ([], r'the book has lines of Bob: add --voice-of "Bob=VOICE"'),
    (["--voice-of", "Bob=x", "--voice-of", "Eve=y"], "--voice-of Eve: the book has no speaker with this name; it has"),
    (["--voice-of", "Bob"], "write NAME=VOICE"),
    (["--voice-of", "Bob=x", "-o", "a.aac"], r"a.aac: the file extension must be one of .m4b, .mp3"),
    (["--voice-of", "Bob=x", "--timed"], r"--timed needs subtitles \(.srt, .vtt\): .*night.txt has no times"),
    (["--voice-of", "Bob=x", "--lexicon", "night.txt"], "night.txt is neither PLS nor JSON"),
])  # fmt: skip
def test_refusals(fake: FakeJobs, file: Path, arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    with pytest.raises(Exception, match=told):
        run_book(file, "--url", fake.url, *arguments)
    assert fake.jobs == {}


def test_a_bad_cover_fails(fake: FakeJobs, tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = tmp_path / "cover.jpg"
    damaged.write_bytes(b"\xff\xd8nothing")
    with pytest.raises(Exception, match="the cover is a damaged picture"):
        make(fake, file, "--cover", str(damaged))
    assert fake.asked == []
    item = '<item id="c" href="c.jpg" media-type="image/jpeg" properties="cover-image"/>'
    extra = {"OEBPS/c.jpg": b"GIF89a"}
    book = epubs.write_epub(tmp_path / "a.epub", {"a.xhtml": epubs.page("<p>x.</p>")}, extra=extra, manifest=item)
    assert run_command(command.book, "talkray book", [str(book), "--show"]) == 0
    assert "left out: the cover is neither JPEG nor PNG" in capsys.readouterr().out


def test_show_speaks_nothing(fake: FakeJobs, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(command.book, "talkray book", [str(file), "--show"]) == 0
    told = capsys.readouterr().out
    assert "night: 2 chapters, 140 characters, about 0:09" in told
    assert "speakers: Bob" in told
    assert fake.asked == []


LINES = [{"id": "a", "text": "Hello there."}, {"text": "Two."}, {"id": "c", "text": "Own.", "seed": 5, "voice": "bob"}]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    return file


def speak(fake: FakeJobs, file: Path, out: Path, *args: str) -> list[dict[str, object]]:
    assert run_command(dataset.dataset, "talkray dataset", [str(file), "-o", str(out), "--url", fake.url, *args]) == 0
    return [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]


def test_a_dataset_is_the_same_twice_in_any_order(fake: FakeJobs, jsonl: Path, tmp_path: Path) -> None:
    first = speak(fake, jsonl, tmp_path / "one")
    assert [(each["id"], each["text"], each["voice"]) for each in first] == [
        ("a", "Hello there.", "alloy"), ("000002", "Two.", "alloy"), ("c", "Own.", "bob"),
    ]  # fmt: skip
    assert (first[2]["seed"], first[0]["duration_s"]) == (5, pytest.approx(12 * CHAR_S))
    for each in first:
        audio = (tmp_path / "one" / str(each["audio"])).read_bytes()
        assert hashlib.sha256(audio).hexdigest() == each["sha256"]
        assert json.loads((tmp_path / "one" / str(each["words"])).read_text())["words"]
    jsonl.write_text("\n".join(json.dumps({"id": each["id"], "text": each["text"]}) for each in reversed(first[:2])))
    again = speak(fake, jsonl, tmp_path / "two")
    assert {each["id"]: each["sha256"] for each in again} == {each["id"]: each["sha256"] for each in first[:2]}
    other = speak(fake, jsonl, tmp_path / "three", "--seed", "1")
    assert other[0]["sha256"] != again[0]["sha256"]


def test_shards_and_a_rerun(fake: FakeJobs, jsonl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "shards"
    entries = speak(fake, jsonl, out, "--shard-size", "2")
    assert [each["audio"] for each in entries] == [
        "shard-00000.tar:a.flac", "shard-00000.tar:000002.flac", "shard-00001.tar:c.flac",
    ]  # fmt: skip
    with tarfile.open(out / "shard-00000.tar") as tar:
        assert tar.getnames() == ["a.flac", "a.json", "000002.flac", "000002.json"]
        member = tar.extractfile("a.flac")
        assert member is not None
        assert soundfile.info(io.BytesIO(member.read())).duration == pytest.approx(12 * CHAR_S)
    first, num_spoken = (out / "shard-00000.tar").read_bytes(), len(fake.spoken)
    speak(fake, jsonl, out, "--shard-size", "2")
    assert len(fake.spoken) == num_spoken
    assert "already contains all lines of" in capsys.readouterr().out
    speak(fake, jsonl, tmp_path / "again", "--shard-size", "2")
    assert (tmp_path / "again" / "shard-00000.tar").read_bytes() == first


@pytest.mark.parametrize(("line", "message"), [
    ("nothing", r"texts.jsonl:1: invalid JSON"), ('["a"]', r"texts.jsonl:1: each line must be an object"),
    ('{"text": " "}', r"texts.jsonl:1: text is required"),
    ('{"text": "a", "id": "../b"}', r"texts.jsonl:1: id '../b' is not a valid file name"),
    ('{"text": "a", "id": "x"}\n{"text": "b", "id": "X"}', r"texts 1 and 2 have the same id 'X'"),
    ("\n", "has no lines"),
])  # fmt: skip
def test_lines_that_are_refused(fake: FakeJobs, jsonl: Path, tmp_path: Path, line: str, message: str) -> None:
    jsonl.write_text(line)
    with pytest.raises(Exception, match=message):
        speak(fake, jsonl, tmp_path / "out")
    assert fake.asked == []

"""The store: what is written is whole, also where its writer dies or the disk is full; what is read is checked."""

import errno
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import obstore
import pytest
from obstore.store import S3Store

from deployments.errors import InvalidRequest, NotFound, StartError
from deployments.protocol import ClonePrompt
from serve_app.extensions.voices import stored_voice
from serve_app.extensions.voices.stored_voice import StoredVoice, Take, new_id, new_version, now, packed, unpack
from serve_app.extensions.voices.voice_store import Damaged, StoreFailed, VoiceStore, default_folder, folder_of
from tests.serve_app.extensions.voices.speakers import files_in

KILLS = 100
# Forks a writer again and again, and kills it at any moment; prints the ids that it had reported by then.
KILLER = """
import os, random, signal, sys, time
from serve_app.extensions.voices.voice_store import VoiceStore
from tests.serve_app.extensions.voices.test_voice_store import KILLS, voice
store = VoiceStore(sys.argv[1])
for number in range(KILLS):
    reading, writing = os.pipe()
    writer = os.fork()
    if not writer:
        while True:
            record, files = voice(f"{number}", size=50_000)
            store.write(record, files)
            os.write(writing, (record.id + chr(10)).encode())
    os.close(writing)
    with open(reading) as lines:
        print(lines.readline().strip())
        time.sleep(random.uniform(0, 0.005))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        print("".join(lines))
"""


def voice(name: str = "ada", *, size: int = 1000) -> tuple[StoredVoice, dict[str, bytes]]:
    recording = name.encode() * (size // len(name))
    take = Take(sha256=hashlib.sha256(recording).hexdigest(), seconds=1.0, num_bytes=len(recording), text="Hello.")
    made = StoredVoice.made(id=new_id("voice"), name=name, created_at=now(), version=new_version(), takes=(take,))
    return made, {take.sha256: recording}


@pytest.fixture
def store(folder: Path) -> VoiceStore:
    return VoiceStore(str(folder))


@pytest.fixture
def record(store: VoiceStore) -> StoredVoice:
    """A voice that is stored."""
    record, files = voice()
    store.write(record, files)
    return record


def names(store: VoiceStore) -> set[str]:
    read = [store.read(path) for path in store.marks()]
    return {record.name for record in read if record is not None}


def test_what_is_written_is_read(store: VoiceStore) -> None:
    record, files = voice()
    store.write(record, files)
    [path] = store.marks()
    assert store.read(path) == record
    assert {take.sha256: store.recording(record, take) for take in record.takes} == files
    prompt = ClonePrompt(np.arange(4, dtype=np.float32), np.arange(32, dtype=np.int16).reshape(2, 16))
    store.keep_derived(record, b"key", prompt)
    kept = store.derived(record, b"key")
    assert kept is not None
    assert kept.codes is not None
    np.testing.assert_array_equal(kept.speaker, prompt.speaker)
    np.testing.assert_array_equal(kept.codes, prompt.codes)
    assert store.derived(record, b"other") is None


def test_nothing_of_a_voice_that_is_removed_stays(folder: Path, store: VoiceStore, record: StoredVoice) -> None:
    store.keep_derived(record, b"key", ClonePrompt(np.zeros(4, np.float32)))
    for left in (f"audio/{record.id}/.half.flac.1234.new", f"voices/.{record.id}.json.1234.new"):  # by a killed writer
        (folder / left).write_bytes(b"half")
    store.remove(record)
    assert files_in(folder) == []
    store.remove(record)  # twice is no error


@pytest.mark.parametrize("late", ["audio", "voices"])
def test_a_change_brings_no_deleted_voice_back(
    folder: Path, store: VoiceStore, record: StoredVoice, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    put = store.put

    def beside(path: str, content: bytes) -> None:
        if path.startswith(late):
            VoiceStore(store.location).remove(record)  # as another process does
        put(path, content)

    monkeypatch.setattr(store, "put", beside)
    with pytest.raises(NotFound, match="during this request"):
        store.write(record.changed(name="grace"), voice("another take")[1])
    assert files_in(folder) == []


def test_a_voice_whose_recording_is_lost_can_be_changed(store: VoiceStore, record: StoredVoice) -> None:
    store.delete(*(meta["path"] for meta in store.listed("audio/")))
    store.write(record.changed(name="grace"), {})
    assert names(store) == {"grace"}


def test_only_its_owner_reads_the_folder(folder: Path, store: VoiceStore, record: StoredVoice) -> None:
    assert {file.stat().st_mode & 0o077 for file in (folder, *files_in(folder))} == {0}


@pytest.mark.parametrize("what", ["voices", "audio"])
def test_a_flipped_bit_is_noticed(folder: Path, store: VoiceStore, record: StoredVoice, what: str) -> None:
    [file] = files_in(folder / what)
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    for damaged in (bytes(content), b"[]", b"{}", b""):
        file.write_bytes(damaged)
        with pytest.raises(Damaged, match="damaged"):
            store.read(f"voices/{record.id}.json") if what == "voices" else store.recording(record, record.takes[0])


def test_a_damaged_derived_file_is_made_anew(folder: Path, store: VoiceStore, record: StoredVoice) -> None:
    store.keep_derived(record, b"key", ClonePrompt(np.zeros(400, np.float32)))
    [file] = folder.rglob("*.npz")
    file.write_bytes(file.read_bytes()[:-300])
    assert store.derived(record, b"key") is None


def test_a_full_disk_loses_nothing(
    store: VoiceStore, record: StoredVoice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    changed = record.changed(name="grace")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StoreFailed) as failed:
            store.write(changed, {})
    assert "No space left" not in str(failed.value)
    assert "No space left" in caplog.text
    assert names(store) == {"ada"}
    assert list(Path(store.location).rglob("*.new")) == []


def test_writers_that_are_killed_leave_whole_voices(tmp_path: Path) -> None:
    """Whatever moment a writer dies at, all that it has reported is there, and nothing that is there is damaged."""
    place = str(tmp_path / "store")
    killed = subprocess.run([sys.executable, "-c", KILLER, place], capture_output=True, text=True, check=True)
    reported, store = set(killed.stdout.split()), VoiceStore(place)
    assert len(reported) >= KILLS
    assert {f"voices/{each}.json" for each in reported} <= set(store.marks())
    for path in store.marks():
        record = store.read(path)
        assert isinstance(record, StoredVoice)
        assert store.recording(record, record.takes[0])


def test_what_dead_writers_left_is_swept(
    folder: Path, store: VoiceStore, record: StoredVoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan, orphans = voice("orphan")
    store.write(orphan, orphans)
    (folder / "voices" / f"{orphan.id}.json").unlink()  # as a death in the middle of `remove` leaves it
    (folder / "audio" / record.id / ".half.new").write_bytes(b"half")
    store.put("audio/lost+found/other.flac", b"of no record")
    assert store.sweep(time.time()) == 0  # it may be being written
    for file in folder.rglob("*"):
        os.utime(file, (0, 0))
    assert store.sweep(time.time()) == 3
    assert store.recording(record, record.takes[0])
    assert {file.name for file in files_in(folder)} == {f"{record.id}.json", f"{record.takes[0].sha256}.flac"}
    for file in folder.rglob("*"):
        os.utime(file, (0, 0))
    monkeypatch.setattr(store, "marks", dict)  # the folder was unmounted for a moment
    assert store.sweep(time.time()) == 0
    assert not (folder / "audio" / orphan.id).exists()


def test_a_sweep_bears_writers_beside_it(folder: Path, store: VoiceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, recordings = voice()
    store.write(stored, recordings)
    gone = folder / "voices" / ".a.json.1234.new"  # listed, and renamed before it is looked at
    monkeypatch.setattr(type(folder), "rglob", lambda *_: iter([gone]))
    assert store.sweep(time.time()) == 0


@pytest.mark.parametrize("place", ["voices", "ftp://host/x", "memory:///", "file://host/x", "./a"])
def test_places_that_are_none(place: str) -> None:
    with pytest.raises(StartError, match=r"api\.voices\.store.*s3://"):
        folder_of(place)


def test_where_voices_lie_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TALKRAY_DATA", str(tmp_path))
    assert default_folder() == tmp_path / "voices"
    monkeypatch.delenv("TALKRAY_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_folder() == Path("/data/talkray/voices")


def test_one_file_carries_a_voice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, files = voice()
    file = tmp_path / "ada.voice"
    file.write_bytes(b"".join(packed(record, lambda take: files[take.sha256])))
    assert unpack(file) == (record, files)
    content = file.read_bytes()
    file.write_bytes(content.replace(b"adaada", b"adaadb", 1))
    with pytest.raises(Exception, match=r"damaged|not a voice file"):
        unpack(file)
    monkeypatch.setattr(stored_voice, "_LARGEST_PART", 998)  # the recording has 999 bytes
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match="flac is larger than 998 bytes"):
        unpack(file)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """S3 as moto plays it."""
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    import boto3

    boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket="voices")
    yield "s3://voices/of/talkray"
    server.stop()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_bucket(bucket: str) -> None:
    store, other = VoiceStore(bucket), VoiceStore(bucket)
    record, files = voice()
    store.write(record, files)
    store.keep_derived(record, b"key", ClonePrompt(np.zeros(4, np.float32)))
    assert [each.create("tokens/one") for each in (store, other, store)] == [True, False, False]
    store.delete("tokens/one")
    assert names(other) == {"ada"}
    assert other.recording(record, record.takes[0])
    before = other.marks()
    changed = record.changed(name="grace")
    store.write(changed, {})
    assert names(other) == {"grace"}
    assert other.marks() != before
    other.remove(changed)
    assert store.marks() == {}
    assert [each for batch in obstore.list(S3Store("voices")) for each in batch] == []


def test_a_bucket_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    store = VoiceStore("s3://voices")
    for _ in range(2):
        with pytest.raises(StoreFailed) as failed:
            store.marks()
    assert caplog.text.count("s3://voices: listing failed") == 1
    assert "s3:" not in str(failed.value)

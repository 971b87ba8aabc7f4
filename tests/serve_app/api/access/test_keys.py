import errno
import json
import os
from pathlib import Path

import pytest

from serve_app.api.access.keys import Keys, read_keys
from serve_app.api.error_replies import Unauthorized
from serve_app.cli import key_file
from serve_app.cli.key_file import create_key, revoke_keys
from serve_app.config import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config" / "keys.json"


@pytest.fixture
def key(file: Path) -> str:
    return create_key(file, "ada")


@pytest.fixture
def keys(file: Path, key: str) -> Keys:
    """As a server has read them with that key."""
    return Keys(file)


def test_a_created_key_is_valid_and_kept_as_a_hash_only(file: Path, key: str) -> None:
    bob, *more = [create_key(file, name) for name in ("bob", 512 * "x", *["ada"] * 3)]
    assert (Keys(file).find(key).name, Keys(file).find(bob).name) == ("ada", "bob")
    with pytest.raises(ConfigError, match="has 513 characters; use at most 512"):
        create_key(file, 513 * "x")
    record, *others = read_keys(file).keys
    assert len({key, bob, *more}) == len({each.sha256 for each in (record, *others)}) == 6
    assert (record.name, key.split("-")[1]) == ("ada", record.id)
    assert key not in file.read_text()
    assert key.removeprefix(f"talkray-{record.id}-") not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


NO_KEYS = ("", "talkray-", "sk-123", "é", "\udc80", "talkray-00000000-" + "A" * 43)


def test_nothing_but_the_whole_key_is_valid(keys: Keys, key: str) -> None:
    last = "A" if key[-1] != "A" else "B"
    for other in (key[:-1], key[:-1] + last, key + "A", key.upper(), f" {key}", *NO_KEYS):
        with pytest.raises(Unauthorized, match="not valid"):
            keys.find(other)
    with pytest.raises(Unauthorized, match="Authorization: Bearer"):  # how to send one
        keys.find(None)


def test_keys_come_and_go_while_the_server_runs(file: Path, keys: Keys, key: str) -> None:
    keys.find(key)
    new = create_key(file, "ada2")
    keys.find(new)
    keys.find(key)
    [ended] = revoke_keys(file, "ada")
    assert key.split("-")[1] == ended.id
    with pytest.raises(Unauthorized):
        keys.find(key)
    keys.find(new)


def test_limits_change_while_the_server_runs(file: Path) -> None:
    key = create_key(file, "ada", max_streams=1)
    keys = Keys(file)
    assert keys.find(key).max_streams == 1
    document = json.loads(file.read_text())
    document["keys"][0]["max_streams"] = 2
    file.write_text(json.dumps(document))
    assert keys.find(key).max_streams == 2


def test_a_key_can_be_revoked_by_its_id(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_key(file, "ada")
    key = create_key(file, "ada")
    revoke_keys(file, key.split("-")[1])
    assert [record.revoked is None for record in read_keys(file).keys] == [True, False]
    monkeypatch.setattr(key_file, "_now", lambda: "later")
    assert [record.id for record in revoke_keys(file, "ada")] == [read_keys(file).keys[0].id]
    assert [record.revoked == "later" for record in read_keys(file).keys] == [True, False]
    with pytest.raises(ConfigError, match="no valid key"):
        revoke_keys(file, key.split("-")[1])


@pytest.mark.usefixtures("key")
def test_an_unknown_key_cannot_be_revoked(file: Path) -> None:
    with pytest.raises(ConfigError, match="'bob'"):
        revoke_keys(file, "bob")


def test_a_broken_file_keeps_the_known_keys(file: Path, keys: Keys, key: str, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text("{")
    keys.find(key)
    keys.find(key)
    assert len(caplog.records) == 1
    assert "the previous keys stay valid" in caplog.text


def test_a_file_is_read_again_after_an_error(file: Path, keys: Keys, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    revoke_keys(file, "ada")

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_bytes", fail)
        keys.find(key)
    with pytest.raises(Unauthorized):
        keys.find(key)


def test_a_file_that_cannot_be_seen_is_not_gone(file: Path, keys: Keys, key: str) -> None:
    away = file.rename(file.with_name("away"))
    file.symlink_to(file.name)  # a loop
    keys.find(key)
    file.unlink()
    away.rename(file)
    keys.find(key)


def test_a_file_with_the_old_time_and_size_is_another_one(file: Path, keys: Keys, key: str) -> None:
    stat, [record] = file.stat(), read_keys(file).keys
    file.write_text(file.read_text().replace(record.sha256, record.sha256[::-1]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(Unauthorized):
        keys.find(key)


def test_a_file_that_is_gone_leaves_no_keys(file: Path, keys: Keys, key: str) -> None:
    file.unlink()
    with pytest.raises(Unauthorized):
        keys.find(key)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"version": 2}', '{"keys": [{"id": "x"}]}', '{"version": 1, "more": 1}']
)
def test_a_server_does_not_start_with_a_broken_file(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(ConfigError, match="is invalid"):
        Keys(file)


def test_a_server_does_not_start_without_the_file(file: Path) -> None:
    with pytest.raises(ConfigError, match="talkray key create"):
        Keys(file)


@pytest.mark.usefixtures("key")
def test_owner_and_mode_of_the_file_stay(file: Path) -> None:
    file.chmod(0o640)
    link = file.with_name("link.json")
    link.symlink_to(file)
    create_key(link, "bob")
    assert file.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert [record.name for record in read_keys(file).keys] == ["ada", "bob"]
    assert sorted(os.listdir(file.parent)) == ["keys.json", "link.json"]


@pytest.mark.usefixtures("key")
def test_a_disk_without_room_changes_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        revoke_keys(file, "ada")
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_name_from_before_the_limit_is_cut(file: Path, key: str) -> None:
    file.write_text(file.read_text().replace('"ada"', f'"{"ada" * 200}"'))
    keys = Keys(file)
    assert keys.find(key).name == ("ada" * 200)[:512]
    assert keys.has_name(keys.find(key).name)
    assert not keys.has_name("ada")

"""The folder store: what is there is whole, is named by its content, and errors say what to do."""

import errno
import os
from pathlib import Path

import pytest
from blake3 import blake3

from shoal.store.folder import Folder, StoreError


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


@pytest.mark.parametrize("data", [b"rows", b""])
def test_a_file_is_named_by_its_content_and_still_there_after_a_restart(tmp_path: Path, data: bytes) -> None:
    name = Folder(tmp_path).put("accepted", data)
    assert name == blake3(data).hexdigest()
    assert Folder(tmp_path).get("accepted", name) == data
    assert files(tmp_path) == [tmp_path / "accepted" / f"{name}.parquet"]


def test_the_same_bytes_twice_are_one_file_written_once(tmp_path: Path) -> None:
    store = Folder(tmp_path)
    name = store.put("accepted", b"rows")
    before = files(tmp_path)[0].stat()
    assert store.put("accepted", b"rows") == name
    assert [path.stat() for path in files(tmp_path)] == [before]


@pytest.mark.parametrize("damage", [b"rowz", b"row", b""])
def test_a_file_changed_on_disk_is_refused_by_name(tmp_path: Path, damage: bytes) -> None:
    store = Folder(tmp_path)
    name = store.put("accepted", b"rows")
    files(tmp_path)[0].write_bytes(damage)
    with pytest.raises(StoreError, match=f"accepted file {name[:16]} .* was changed on disk"):
        store.get("accepted", name)


def test_an_unknown_hash_is_answered_with_where_it_is_not(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"cannot read accepted file {'a' * 16} in {tmp_path}: No such file"):
        Folder(tmp_path).get("accepted", "a" * 64)


def fail_with(number: int) -> object:
    def failing(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return failing


def test_a_full_disk_is_said_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Folder(tmp_path)
    with monkeypatch.context() as patched, pytest.raises(StoreError, match="No space left on device; free space there"):
        patched.setattr(os, "fsync", fail_with(errno.ENOSPC))
        store.put("accepted", b"rows")
    assert files(tmp_path) == []
    store.put("accepted", b"rows")  # once there is space, all is well


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "open", fail_with(number))  # root may write anywhere
    with pytest.raises(StoreError, match=f"cannot store a file in {tmp_path}: .* may write"):
        Folder(tmp_path).put("accepted", b"rows")


def test_a_file_that_arrives_in_pieces_is_kept_only_if_it_is_committed(tmp_path: Path) -> None:
    store = Folder(tmp_path)
    with store.receive("accepted") as incoming:
        incoming.write(b"ro")
        incoming.write(b"ws")
        assert incoming.commit() == blake3(b"rows").hexdigest()
    with store.receive("accepted") as incoming:
        incoming.write(b"lost")
    assert files(tmp_path) == [tmp_path / "accepted" / f"{blake3(b'rows').hexdigest()}.parquet"]
    assert store.get("accepted", blake3(b"rows").hexdigest()) == b"rows"


def test_a_file_in_the_place_of_the_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "accepted").write_text("")
    with pytest.raises(StoreError, match="see that it is a folder"):
        Folder(tmp_path).put("accepted", b"rows")


def test_a_rename_that_fails_leaves_no_file_under_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rename", fail_with(errno.EIO))
    with pytest.raises(StoreError, match="Input/output error"):
        Folder(tmp_path).put("accepted", b"rows")
    assert files(tmp_path) == []

"""The folder store holds only complete files, named by their content, and its errors say what to do."""

import errno
import os
from pathlib import Path

import pytest
from blake3 import blake3

from shoal.store.folder import Folder, StoreError


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def fail_with(number: int) -> object:
    def failing(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return failing


@pytest.mark.parametrize("data", [b"rows", b""])
def test_a_file_is_written_once_and_named_by_its_content(tmp_path: Path, data: bytes) -> None:
    name = Folder(tmp_path).put("accepted", data)
    assert files(tmp_path) == [tmp_path / "accepted" / f"{blake3(data).hexdigest()}.parquet"]
    before = files(tmp_path)[0].stat()
    assert Folder(tmp_path).put("accepted", data) == name
    assert [path.stat() for path in files(tmp_path)] == [before]
    assert Folder(tmp_path).get("accepted", name) == data


@pytest.mark.parametrize("damage", [b"rowz", b"row", b""])
def test_a_file_changed_on_disk_is_refused(tmp_path: Path, damage: bytes) -> None:
    store = Folder(tmp_path)
    name = store.put("accepted", b"rows")
    files(tmp_path)[0].write_bytes(damage)
    with pytest.raises(StoreError, match=f"accepted file {name[:16]} .* was changed on disk"):
        store.get("accepted", name)


def test_an_unknown_hash_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"cannot read accepted file {'a' * 16} in {tmp_path}: No such file"):
        Folder(tmp_path).get("accepted", "a" * 64)


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Folder(tmp_path)
    with monkeypatch.context() as patched, pytest.raises(StoreError, match="No space left on device; free space there"):
        patched.setattr(os, "fsync", fail_with(errno.ENOSPC))
        store.put("accepted", b"rows")
    assert files(tmp_path) == []
    store.put("accepted", b"rows")


def test_a_failed_rename_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rename", fail_with(errno.EIO))
    with pytest.raises(StoreError, match="Input/output error"):
        Folder(tmp_path).put("accepted", b"rows")
    assert files(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_an_unwritable_folder_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "open", fail_with(number))  # root may write anywhere
    with pytest.raises(StoreError, match=f"cannot store a file in {tmp_path}: .* may write"):
        Folder(tmp_path).put("accepted", b"rows")


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "accepted").write_text("")
    with pytest.raises(StoreError, match="make it a folder"):
        Folder(tmp_path).put("accepted", b"rows")


def test_a_file_received_in_pieces_is_kept_only_if_it_is_committed(tmp_path: Path) -> None:
    store = Folder(tmp_path)
    with store.receive("accepted") as incoming:
        incoming.write(b"ro")
        incoming.write(b"ws")
        assert incoming.commit() == blake3(b"rows").hexdigest()
    with store.receive("accepted") as incoming:
        incoming.write(b"lost")
    assert files(tmp_path) == [tmp_path / "accepted" / f"{blake3(b'rows').hexdigest()}.parquet"]
    assert store.get("accepted", blake3(b"rows").hexdigest()) == b"rows"

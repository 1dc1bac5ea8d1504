"""Files that are written under a temporary name."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.files import (
    DamagedFileError,
    NewFile,
    append_lines,
    commit_folder_once,
    keep_lines,
    new_file,
    read_json,
    write_file,
    write_new_file,
)


def test_the_error_of_a_full_disk_is_not_hidden_by_closing_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"), new_file(tmp_path / "shard") as file:  # noqa: PT012
        monkeypatch.setattr(os, "open", full)
        file.truncate()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [write_file, write_new_file])
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_the_error_of_a_full_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None], call: str
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'state.json'}'"):
        write(tmp_path / "state.json", b"{}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("data", [b"", b'{"steps": 3', b"\xff\xfe{}"])
def test_the_error_of_damaged_json_names_the_file_and_the_next_step(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "legs.json"
    path.write_bytes(data)
    with pytest.raises(DamagedFileError, match=f"^{path} is damaged .*: restore it from a copy, or remove it$"):
        read_json(path)
    path.write_bytes(b"{}\n" + data + b"\n")
    with pytest.raises(DamagedFileError, match=f"^{path} is damaged "):
        keep_lines(path, bool)


def test_a_folder_that_cannot_be_committed_is_an_error_unless_it_exists(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with pytest.raises(FileNotFoundError):
        commit_folder_once(tmp_path / "new", tmp_path / "missing" / "final")
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "other").touch()
    commit_folder_once(tmp_path / "new", tmp_path / "final")
    assert (tmp_path / "final" / "other").exists()


def test_a_failed_append_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "work.jsonl"
    append_lines(path, [{"n": 1}])
    real, writes = os.pwrite, 0

    def half(fd: int, data: bytes, offset_bytes: int) -> int:
        nonlocal writes
        writes += 1
        if writes > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[: len(data) // 2], offset_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", half)
        with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
            append_lines(path, [{"n": 2}])
    append_lines(path, [{"n": 3}])
    assert path.read_text() == '{"n": 1}\n{"n": 3}\n'


@pytest.mark.parametrize("again", [False, True])
def test_a_link_that_another_user_plants_under_the_temporary_name_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """In a shared folder, another user may create the temporary name between its removal and its creation."""
    target = tmp_path / "target"
    target.write_text("kept")
    unlink = Path.unlink
    file = NewFile(tmp_path / "file") if again else None

    def unlink_and_plant(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        path.symlink_to(target)

    monkeypatch.setattr(Path, "unlink", unlink_and_plant)
    with pytest.raises(FileExistsError):
        file.truncate() if file else NewFile(tmp_path / "file")
    assert target.read_text() == "kept"

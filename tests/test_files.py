"""Files that are written under a temporary name."""

import errno
import os
from pathlib import Path

import pytest

from shoal.files import new_file


def test_the_error_of_a_full_disk_is_not_hidden_by_closing_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"), new_file(tmp_path / "shard") as file:  # noqa: PT012
        monkeypatch.setattr(os, "open", full)
        file.truncate()
    assert not list(tmp_path.iterdir())

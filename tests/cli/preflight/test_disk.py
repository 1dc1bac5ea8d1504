"""The disk space that a run needs, and the errors if it is missing."""

import errno
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.preflight.machine import (
    RESERVE_BYTES,
    DiskNeeds,
    check_left,
    check_space,
    disk_finding,
    disk_needs,
    explain,
    file_system,
    used_bytes,
)
from shoal.config import Config, parse
from shoal.errors import ShoalError

MODEL = 100_000_000  # parameters
CHECKPOINT, VERSION = 12 * MODEL, 2 * MODEL
NEEDS = disk_needs(Config(), MODEL)


def peak(**sections: Any) -> int:
    return disk_needs(parse(sections), MODEL).peak_bytes


@pytest.mark.parametrize(
    ("more", "bytes_more"),
    [
        ({"learner": {"keep_last": Config().learner.keep_last + 1}}, CHECKPOINT),
        ({"workers": {"count": Config().workers.count + 1}}, 3 * VERSION),
        ({"validator": {"count": Config().validator.count + 1}}, 5 * VERSION),
    ],
)
def test_the_estimate_grows_with_settings_that_keep_more_files(more: dict[str, Any], bytes_more: int) -> None:
    assert peak(**more) - peak() == bytes_more


def test_the_estimate_counts_relays_sites_and_their_meeting() -> None:
    assert peak(relays={"count": Config().relays.count + 1}) - peak() > VERSION, (
        "a relay must add at least one whole version"
    )
    one_more = (Config().learner.keep_last + 1) * CHECKPOINT + (Config().learner.keep_versions + 1) * VERSION
    assert peak(learner={"sites": 3}) - peak(learner={"sites": 2}) == one_more
    assert peak(learner={"sites": 1}) - peak() > 3 * CHECKPOINT, "the estimate must count the meeting's states"


def test_a_short_run_needs_less_space_and_keeps_only_part_of_it() -> None:
    assert peak(run={"steps": 1}) < peak() / 2
    assert CHECKPOINT < NEEDS.kept_bytes < NEEDS.peak_bytes


def test_a_run_must_fit_on_the_disk_without_using_its_reserve(tmp_path: Path) -> None:
    enough = NEEDS.peak_bytes + RESERVE_BYTES
    check_space(tmp_path, NEEDS, free=enough)
    assert disk_finding(NEEDS, enough).level == "ok" and disk_finding(NEEDS, enough - 1).level == "fails"
    with pytest.raises(
        ShoalError, match=r"the file system /\S* has \d+\.\d GiB free, but this run needs up to \d+\.\d"
    ):
        check_space(tmp_path, NEEDS, free=enough - 1)
    check_left(tmp_path, RESERVE_BYTES)
    with pytest.raises(ShoalError, match="is full: 64 MiB are left"):
        check_left(tmp_path, RESERVE_BYTES - 1)


def test_a_resumed_run_needs_only_the_space_that_it_has_not_yet_used(tmp_path: Path) -> None:
    with (tmp_path / "checkpoint").open("wb") as sparse:
        sparse.truncate(10**9)
    check_space(tmp_path, DiskNeeds(10**9, 0), free=RESERVE_BYTES)


def test_a_file_with_two_hard_links_counts_once_and_a_symbolic_link_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(bytes(100))
    (tmp_path / "again").hardlink_to(tmp_path / "shard")
    (tmp_path / "link").symlink_to(tmp_path / "shard")
    assert used_bytes(tmp_path) == 100


def test_a_full_disk_is_explained_with_its_file_system(tmp_path: Path) -> None:
    assert "full: free space there" in explain(OSError(errno.ENOSPC, "no space"), tmp_path)
    assert str(file_system(tmp_path)) in explain(OSError("rank 0: [Errno 28] No space left on device"), tmp_path)
    assert explain(OSError(errno.EACCES, "denied"), tmp_path) == "[Errno 13] denied"

"""What a run needs of a disk, and what is removed after it."""

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest

from shoal import config as config_module
from shoal.cli.launch.folder import LOCK, FolderError, locked, remove_caches, stopped_run
from shoal.cli.preflight.disk import (
    RESERVE_BYTES,
    DiskFullError,
    Needs,
    check_space,
    explain,
    file_system,
    needs,
    used_bytes,
)
from shoal.config import Config, parse

MODEL = 100_000_000  # parameters


def test_the_estimate_follows_the_settings_that_keep_files() -> None:
    config = Config()
    peak = needs(config, MODEL).peak_bytes
    more = parse({"learner": {"keep_last": 3}})
    assert needs(more, MODEL).peak_bytes - peak == 12 * MODEL  # a checkpoint: fp32 masters and two moments
    workers = parse({"workers": {"count": config.workers.count + 1}})
    assert needs(workers, MODEL).peak_bytes - peak == 3 * 2 * MODEL
    relays = parse({"relays": {"count": config.relays.count + 1}})
    assert needs(relays, MODEL).peak_bytes - peak > 2 * MODEL, "a relay holds at least one whole version"
    assert 12 * MODEL < needs(config, MODEL).kept_bytes < peak


def test_the_estimate_counts_the_checkpoint_that_is_written_beside_the_kept_ones() -> None:
    def peak(checkpoint_every: int) -> int:
        learner = {"keep_last": 1, "checkpoint_every": checkpoint_every}
        return needs(parse({"run": {"steps": 20}, "learner": learner}), MODEL).peak_bytes

    assert peak(checkpoint_every=10) - peak(checkpoint_every=20) == 12 * MODEL


def test_the_estimate_counts_every_site_and_their_meeting() -> None:
    def found(sites: int, kind: str = "bf16") -> Needs:
        return needs(parse({"learner": {"sites": sites}, "sites": {"kind": kind}}), MODEL)

    one_more = (Config().learner.keep_last + 1) * 12 * MODEL + (Config().learner.keep_versions + 1) * 2 * MODEL
    assert found(3).peak_bytes - found(2).peak_bytes == one_more
    assert found(1).peak_bytes - needs(Config(), MODEL).peak_bytes > 3 * 12 * MODEL  # the meeting's states
    assert found(2, "fp64").peak_bytes - found(2).peak_bytes == 3 * (8 - 2) * MODEL
    assert found(2).kept_bytes - needs(Config(), MODEL).kept_bytes > 2 * 12 * MODEL


def test_a_short_run_needs_less() -> None:
    short = parse({"run": {"steps": 1}})
    assert needs(short, MODEL).peak_bytes < needs(Config(), MODEL).peak_bytes / 2


def test_a_run_that_does_not_fit_is_refused_with_the_file_system(tmp_path: Path) -> None:
    wanted = needs(Config(), MODEL)
    check_space(tmp_path, wanted, free=2 * wanted.peak_bytes)
    with pytest.raises(
        DiskFullError, match=r"the file system /\S* has 1.0 GB free, and this run needs up to \d+.\d GB"
    ):
        check_space(tmp_path, wanted, free=10**9)


def test_a_run_must_fit_beside_the_reserve_that_would_stop_it(tmp_path: Path) -> None:
    wanted = needs(Config(), MODEL)
    check_space(tmp_path, wanted, free=wanted.peak_bytes + RESERVE_BYTES)
    with pytest.raises(DiskFullError):
        check_space(tmp_path, wanted, free=wanted.peak_bytes + RESERVE_BYTES - 1)


def test_what_a_resumed_run_has_already_written_is_not_needed_again(tmp_path: Path) -> None:
    wanted = needs(Config(), MODEL)
    with (tmp_path / "checkpoint").open("wb") as sparse:
        sparse.truncate(wanted.peak_bytes)
    check_space(tmp_path, wanted, free=10**9)


def test_a_file_with_two_names_counts_once_and_a_link_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(bytes(100))
    (tmp_path / "again").hardlink_to(tmp_path / "shard")
    (tmp_path / "link").symlink_to(tmp_path / "shard")
    assert used_bytes(tmp_path) == 100


def test_a_full_disk_is_explained_with_its_file_system(tmp_path: Path) -> None:
    assert "full: free space there" in explain(OSError(errno.ENOSPC, "no space"), tmp_path)
    assert str(file_system(tmp_path)) in explain(OSError("rank 0: [Errno 28] No space left on device"), tmp_path)
    assert explain(OSError(errno.EACCES, "denied"), tmp_path) == "[Errno 13] denied"


def stopped(folder: Path, *, keep: int = 2, sites: int = 0) -> Path:
    """A run's folder as a stopped run leaves it. `keep`: versions at the relays."""
    (folder / "coordinator").mkdir(parents=True)
    (folder / "coordinator" / "coordinator.json").write_text('{"run": "r", "url": "http://127.0.0.1:1"}')
    learner = {"keep_versions": 1, "sites": sites}
    config = parse({"learner": learner, "relays": {"keep": keep}})
    (folder / "config.toml").write_text(config_module.dumps(config))
    names = {
        "coordinator": ["pool.sqlite", "store/accepted/a.parquet"],
        "learner": ["invite", "identity.pem", *(f"versions/v00000{n}/w" for n in (7, 8))],
        "origin": [
            "invite",
            "store/v000006/full/s",
            "store/v000007/full/s",
            "store/v000007/delta/s",
            "store/v000008/delta/s",
        ],
        "relay-0": ["invite", "store/v000008/manifest.json"],
        "worker-0": ["invite", "identity.pem", "weights/v000008/w"],
        "validator": ["invite", "weights/v000008/w"],
        "model": ["w"],
        "logs": ["learner.log"],
    }
    for node, files in names.items():
        for name in files:
            (folder / node / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / node / name).write_text("x" * 100)
    for step in (2, 4, 8):
        path = folder / f"learner/checkpoints/step-00000{step}/shard"
        path.parent.mkdir(parents=True)
        path.write_text("x" * 1000)
    return folder


def test_cleaning_keeps_what_resuming_and_the_user_need(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run")
    before = used_bytes(run)
    assert remove_caches(run, config_module.load(run / "config.toml")) == before - used_bytes(run) == 2 * 1000 + 5 * 100
    for kept in (
        "coordinator/pool.sqlite",
        "coordinator/store/accepted/a.parquet",
        "learner/checkpoints/step-000008/shard",
        "learner/versions/v000008/w",
        "origin/store/v000007/full/s",
        "origin/store/v000008/delta/s",
        "worker-0/identity.pem",
        "worker-0/invite",
        "model/w",
        "logs/learner.log",
    ):
        assert (run / kept).exists(), kept
    for gone in (
        "worker-0/weights",
        "validator/weights",
        "relay-0/store",
        "learner/versions/v000007",
        "origin/store/v000006",
    ):
        assert not (run / gone).exists(), gone
    assert remove_caches(run, config_module.load(run / "config.toml")) == 0


def test_the_folders_of_sites_and_of_their_meeting_are_cleaned(tmp_path: Path) -> None:
    """The meeting was killed between writing round 8's state and naming it: it goes on in round 7."""
    run = stopped(tmp_path / "run", sites=2)
    shutil.copytree(run / "learner", run / "learner-1")
    meet = run / "meet"
    (meet / "invites").mkdir(parents=True)
    (meet / "invites" / "site-0.invite").write_text("x")
    (meet / "meeting.json").write_text('{"round": 7}')
    for name, rounds in (("state", (6, 7, 8)), ("rounding", (6, 7, 8)), ("average", (5, 6, 7))):
        for number in rounds:
            (meet / f"{name}-{number:06d}.safetensors").write_text("x" * 100)
    shutil.copytree(run / "learner/versions", meet / "versions")
    remove_caches(run, config_module.load(run / "config.toml"))
    for node in ("learner", "learner-1", "meet"):
        assert [path.name for path in (run / node / "versions").iterdir()] == ["v000008"], node
    assert [path.name for path in (run / "learner-1/checkpoints").iterdir()] == ["step-000008"]
    left = {path.name for path in meet.glob("*.safetensors")}
    named = (("average", 6), ("average", 7), ("rounding", 7), ("rounding", 8), ("state", 7), ("state", 8))
    assert left == {f"{name}-{number:06d}.safetensors" for name, number in named}
    assert (meet / "invites/site-0.invite").exists() and (run / "learner-1/invite").exists()
    assert remove_caches(run, config_module.load(run / "config.toml")) == 0


@pytest.mark.parametrize(("keep", "left"), [(1, [7, 8]), (2, [7, 8]), (3, [6, 7, 8]), (9, [6, 7, 8])])
def test_the_origin_can_still_serve_the_versions_that_relays_keep(tmp_path: Path, keep: int, left: list[int]) -> None:
    """A submission of one of them may wait for its verdict, and without these weights no validator can give it."""
    run = stopped(tmp_path / "run", keep=keep)
    remove_caches(run, config_module.load(run / "config.toml"))
    assert sorted(int(path.name[1:]) for path in (run / "origin/store").iterdir()) == left


def test_versions_without_an_anchor_stay(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run")
    for full in run.glob("origin/store/*/full"):
        (full / "s").unlink()
        full.rmdir()
    remove_caches(run, config_module.load(run / "config.toml"))
    assert len(list((run / "origin/store").iterdir())) == 3


def test_a_folder_without_a_run_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=f"{tmp_path} holds no run"):
        stopped_run(tmp_path)


def test_a_run_that_is_still_going_keeps_its_folder(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run")
    with locked(run), pytest.raises(FolderError, match="still going"), locked(run):
        pass


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    fd = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(FolderError), locked(tmp_path):
        pass
    os.close(fd)
    with locked(tmp_path):
        pass

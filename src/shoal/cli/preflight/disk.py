"""Disk space: what a run needs, what its file system has, and which file system that is.

Invariant: the estimate is an upper bound for checkpoints and weights, which are nearly all of a run's bytes. Rollouts are
not counted.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from shoal.config import Config
from shoal.config.recipe import CHECKPOINT_BYTES
from shoal.errors import ShoalError, disk_is_full
from shoal.shardcast.origin import ANCHOR_EVERY

VERSION_BYTES = 2  # per parameter: versions are published in bf16
STATE_BYTES = 12  # per parameter: what sites agree on and its velocity, and what rounding left over, in fp32
WIRE_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "int8": 2, "int4": 1}  # of one number, rounded up
ROUNDS = 3  # of the sites' meeting: two are kept, beside the one that is written
DELTA_FRAC = 0.15  # of a version: measured 0.02 (135M parameters, lr 4e-5) to 0.15 (3M parameters, lr 1e-4)
WORKER_KEEP, EVALUATOR_KEEP = 2, 1  # versions in the caches of these roles
KEEP_LESS = "free space there, choose another folder with --out, or keep less (learner.keep_last, relays.keep)"
RESERVE_BYTES = 64 << 20  # a run stops while this much is left, so that it ends in order


class DiskFullError(ShoalError):
    """The file system has too little space; the message names it."""


@dataclass(frozen=True)
class Needs:
    peak_bytes: int  # while the run goes
    kept_bytes: int  # after it


def needs(config: Config, parameters: int) -> Needs:
    """What a run of this config needs, for a model of so many parameters."""
    learner, steps = config.learner, config.run.steps
    version = VERSION_BYTES * parameters
    checkpoint = version if learner.lora else CHECKPOINT_BYTES * parameters

    def versions(keep: int) -> int:
        return min(keep + 1, steps + 1) * version  # one more while it is written

    written = math.ceil(steps / learner.steps_between_checkpoints(0 if learner.lora else parameters))
    checkpoints = min(learner.keep_last + 1, written) * checkpoint
    workers = config.workers.count * versions(WORKER_KEEP)
    validators = config.validator.count * versions(config.coordinator.async_level + 2)
    evaluator = versions(EVALUATOR_KEEP)
    sites, meeting_round, meeting = 1, 0, 0
    if learner.sites:
        sites = learner.sites
        meeting_round = version if learner.lora else (STATE_BYTES + WIRE_BYTES[config.sites.kind]) * parameters
        meeting = ROUNDS * meeting_round + versions(learner.keep_versions)

    def store(keep: int) -> int:
        """Kept versions are deltas of others, back to a version that is stored whole."""
        n = min(keep + ANCHOR_EVERY + 1, steps + 1)
        whole = math.ceil(n / ANCHOR_EVERY)
        return int((whole + DELTA_FRAC * n) * version)

    stores = (1 + config.relays.count) * store(config.relays.keep)
    caches = sites * versions(learner.keep_versions) + meeting + workers + validators + evaluator + stores
    kept = sites * (checkpoint + version) + store(config.relays.keep)
    kept += meeting_round + version if learner.sites else 0
    peak = sites * checkpoints + caches
    return Needs(peak_bytes=peak, kept_bytes=min(kept, peak))


def said(needs: Needs, free: int) -> str:
    """For people."""
    return (
        f"up to {gigabytes(needs.peak_bytes)} during the run, up to {gigabytes(needs.kept_bytes)} after it, "
        f"{gigabytes(free)} free"
    )


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def used_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`; a file with several names counts once."""
    sizes = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            found = path.stat()
            sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def file_system(folder: Path) -> Path:
    """Where the file system that holds `folder` is mounted."""
    path = folder.resolve()
    while not path.is_mount():
        path = path.parent
    return path


def check_space(folder: Path, wanted: Needs, free: int) -> None:
    """Raise DiskFullError if the run in `folder` may need more than is `free` on its file system."""
    missing = wanted.peak_bytes - used_bytes(folder) + RESERVE_BYTES
    if free < missing:
        raise DiskFullError(
            f"the file system {file_system(folder)} has {gigabytes(free)} free, and this run needs up to "
            f"{gigabytes(missing)} in {folder}: {KEEP_LESS}"
        )


def check_left(folder: Path, free: int) -> None:
    """Raise DiskFullError if a running run has nearly used up its file system."""
    if free < RESERVE_BYTES:
        raise DiskFullError(
            f"the file system {file_system(folder)} is full: {free >> 20} MiB are left; free space there, then resume"
        )


def explain(error: Exception, folder: Path) -> str:
    """The error's message; for a full disk, with the file system of the run."""
    full = disk_is_full(error) and not isinstance(error, DiskFullError)
    return (
        f"{error}; the file system {file_system(folder)} is full: free space there, then resume" if full else str(error)
    )


def gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.0f} MB"

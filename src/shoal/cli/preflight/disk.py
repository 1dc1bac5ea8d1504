"""Disk space: what a run needs, what its file system has, and which file system that is.

Invariant: the estimate is an upper bound for checkpoints and weights, which are nearly all of a run's bytes. Rollouts are
not counted.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.preflight.machine import VERSION_BYTES, CheckLine, fails, ok
from shoal.config import Config
from shoal.config.recipe import CHECKPOINT_BYTES
from shoal.errors import ShoalError, disk_is_full
from shoal.shardcast.origin import ANCHOR_EVERY
from shoal.shardcast.store import KEEP
from shoal.watch.figures import memory as size

# per parameter: what sites agree on, its velocity, what rounding left over (fp32), an average of 8 at most
ROUND_BYTES = 20
ROUNDS = 3  # of the sites' meeting: two are kept, beside the one that is written
DELTA_FRAC = 0.15  # of a version: measured 0.02 (135M parameters, lr 4e-5) to 0.15 (3M parameters, lr 1e-4)
WORKER_KEEP, EVALUATOR_KEEP = 2, 1  # versions in the caches of these roles
KEEP_LESS = "free space there, choose another folder with --out, or keep less (learner.keep_last)"
RESERVE_BYTES = 64 << 20  # a run stops while this much is left, so that it ends in order


@dataclass(frozen=True)
class Needs:
    peak_bytes: int  # while the run goes
    kept_bytes: int  # after it


def needs(config: Config, parameters: int) -> Needs:
    """Return the disk space that a run of this config needs, for a model with this number of parameters."""
    learner, steps, sites = config.learner, config.run.steps, max(1, config.learner.sites)
    version = VERSION_BYTES * parameters
    checkpoint = version if learner.lora else CHECKPOINT_BYTES * parameters

    def versions(keep: int) -> int:
        return min(keep + 1, steps + 1) * version  # one more while it is written

    def store(keep: int) -> int:
        """Kept versions are deltas of others, back to a version that is stored whole."""
        n = min(keep + ANCHOR_EVERY + 1, steps + 1)
        return int((math.ceil(n / ANCHOR_EVERY) + DELTA_FRAC * n) * version)

    written = math.ceil(steps / learner.steps_between_checkpoints(0 if learner.lora else parameters))
    meeting = 0
    if learner.sites:
        meeting = ROUNDS * (version if learner.lora else ROUND_BYTES * parameters) + versions(learner.keep_versions)
    kept = sites * (checkpoint + versions(learner.keep_versions)) + version
    kept += store(KEEP) + meeting
    caches = config.workers.count * versions(WORKER_KEEP) + versions(EVALUATOR_KEEP)
    caches += config.validator.count * versions(config.coordinator.async_level + 2)
    caches += config.relays.count * store(KEEP)
    peak = kept + caches + sites * min(learner.keep_last, written - 1) * checkpoint
    return Needs(peak_bytes=peak, kept_bytes=kept)


def finding(needs: Needs, free: int) -> CheckLine:
    text = f"up to {size(needs.peak_bytes)} during the run, up to {size(needs.kept_bytes)} after it, {size(free)} free"
    return ok("disk", text) if free >= needs.peak_bytes + RESERVE_BYTES else fails("disk", text, KEEP_LESS)


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
    """Raise ShoalError if the run in `folder` may need more than is `free` on its file system."""
    missing = wanted.peak_bytes - used_bytes(folder) + RESERVE_BYTES
    if free < missing:
        raise ShoalError(
            f"the file system {file_system(folder)} has {size(free)} free, and this run needs up to {size(missing)} in "
            f"{folder}: {KEEP_LESS}"
        )


def check_left(folder: Path, free: int) -> None:
    """Raise ShoalError if a running run has nearly used up its file system."""
    if free < RESERVE_BYTES:
        left = f"{size(free)} are left; free space there, then resume"
        raise ShoalError(f"the file system {file_system(folder)} is full: {left}")


def explain(error: Exception, folder: Path) -> str:
    """The error's message; for a full disk, with the file system of the run."""
    full = f"; the file system {file_system(folder)} is full: free space there, then resume"
    return f"{error}{full if disk_is_full(error) else ''}"

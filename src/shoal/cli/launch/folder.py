"""The folder of a run: which run it holds, the lock on it while the run is going, and what is freed when it has ended.

Invariant: at most one `shoal run` works in a folder at a time. What resuming and the user need is never removed:

    learner       `model/`, the newest checkpoint, the newest `learner.keep_versions`; of each site, if it has several
    sites         the state from which their meeting resumes
    origin        the newest `relays.keep` versions, with the deltas and anchors they need: a manifest is signed only once,
                  and submissions of these versions may wait for a validator
    all           the coordinator's folder, keys, invites, logs and metrics
"""

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.cli.launch.members import MEETING, members
from shoal.cli.preflight.disk import used_bytes
from shoal.config import Config
from shoal.errors import UserError
from shoal.protocol.invite import Address, AddressError

CACHES = ("weights", "store", "tasks")  # of every node except the origin: another node has the same bytes
LOCK = ".running"


class FolderError(UserError):
    """A folder that holds no run, or a run that is still going."""


def stopped_run(folder: Path) -> tuple[str, str]:
    """(name, coordinator's address) of the run in `folder`. Raises FolderError."""
    try:
        address = Address.read(folder / "coordinator")
    except AddressError as error:
        raise FolderError(f"{folder} holds no run to resume: no coordinator listened there") from error
    return address.run, address.url


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process. Raises FolderError if another one holds it."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderError(f"the run in {folder} is still going; stop it first") from error
        yield


def remove_caches(folder: Path, config: Config) -> int:
    """Remove weight caches, relay stores, older versions and older checkpoints. Returns the bytes freed."""
    before = used_bytes(folder)
    for node in folder.iterdir():
        if (node / "invite").is_file() and node.name != "origin":
            for name in CACHES:
                shutil.rmtree(node / name, ignore_errors=True)
    for learner in (folder / each.name for each in members(config) if each.role == "learner"):
        _remove_versions(learner, config)
        for old in sorted(learner.glob("checkpoints/step-*"))[:-1]:
            shutil.rmtree(old)
    if config.learner.sites:
        _remove_versions(folder / MEETING, config)
        _remove_rounds(folder / MEETING)
    for old in _unneeded(sorted(folder.glob("origin/store/v*")), config.relays.keep):
        shutil.rmtree(old)
    return before - used_bytes(folder)


def _remove_versions(node: Path, config: Config) -> None:
    for old in sorted(node.glob("versions/v*"))[: -config.learner.keep_versions]:
        shutil.rmtree(old)


def _remove_rounds(meeting: Path) -> None:
    """What sites agreed on before the open round's state, which the meeting names, and the last average."""
    held = meeting / "meeting.json"
    open_round = json.loads(held.read_text())["round"] if held.exists() else 0
    for name, oldest in (("state", open_round), ("rounding", open_round), ("average", open_round - 1)):
        for path in meeting.glob(f"{name}-*.safetensors"):
            if int(path.stem.removeprefix(f"{name}-")) < oldest:
                path.unlink()


def _unneeded(versions: list[Path], keep: int) -> list[Path]:
    """Those that the newest `keep` do not need: each is a delta of the one before, back to an anchor, which is whole."""
    oldest = versions[-keep:][0] if versions else None
    anchors = [version for version in versions if oldest and version <= oldest and (version / "full").exists()]
    return versions[: versions.index(anchors[-1])] if anchors else []

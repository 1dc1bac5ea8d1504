"""Free the disk space that a stopped run no longer needs: `shoal clean DIR`, and the end of `shoal run`.

Invariant: what resuming and the user need is never removed:

    learner       `model/`, the newest checkpoint and those of `learner.keep_every`, the newest `learner.keep_versions`; of
                  each site, if it has several
    sites         the state from which their meeting resumes
    origin        the newest `relays.keep` versions, with the deltas and anchors they need: a manifest is signed only once,
                  and submissions of these versions may wait for a validator
    all           the coordinator's folder, keys, invites, logs and metrics

Called by `cli` and `swarm`.
"""

import json
import shutil
from pathlib import Path

from shoal import config as config_module
from shoal.cli.launch.folder import locked, stopped_run
from shoal.cli.launch.members import MEETING, members
from shoal.cli.preflight.disk import used_bytes
from shoal.config import Config

CACHES = ("weights", "store", "tasks")  # of every node except the origin: another node has the same bytes


def clean_run(folder: Path) -> int:
    """Remove what a stopped run in `folder` does not need to be resumed. Returns the bytes freed.

    Raises FolderError if the folder holds no run, or if its run has not stopped.
    """
    stopped_run(folder)
    config = config_module.load(folder / "config.toml")
    with locked(folder):
        return remove_caches(folder, config)


def remove_caches(folder: Path, config: Config) -> int:
    """Remove weight caches, relay stores, older versions and older checkpoints. Returns the bytes freed."""
    before = used_bytes(folder)
    for node in folder.iterdir():
        if (node / "invite").is_file() and node.name != "origin":
            for name in CACHES:
                shutil.rmtree(node / name, ignore_errors=True)
    for learner in (folder / each.name for each in members(config) if each.role == "learner"):
        _remove_versions(learner, config)
        _remove_checkpoints(learner, config)
    if config.learner.sites:
        _remove_versions(folder / MEETING, config)
        _remove_rounds(folder / MEETING)
    for old in _unneeded(sorted(folder.glob("origin/store/v*")), config.relays.keep):
        shutil.rmtree(old)
    return before - used_bytes(folder)


def _remove_versions(node: Path, config: Config) -> None:
    for old in sorted(node.glob("versions/v*"))[: -config.learner.keep_versions]:
        shutil.rmtree(old)


def _remove_checkpoints(learner: Path, config: Config) -> None:
    every = config.learner.keep_every
    for old in sorted(learner.glob("checkpoints/step-*"))[:-1]:
        if not every or int(old.name.removeprefix("step-")) % every:
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

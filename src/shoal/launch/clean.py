"""Free the disk space that a stopped run no longer needs: `shoal clean DIR`, and the end of `shoal run`.

Invariant: what resuming and the user need is never removed: `model/`, the newest checkpoint and those of
`learner.keep_every`, the newest version with what the origin needs to serve it (a manifest is signed only once), the
coordinator's folder, keys, invites, logs and metrics. Called by `cli` and `swarm`.
"""

import shutil
from pathlib import Path

from shoal import config as config_module
from shoal.launch.disk import used_bytes
from shoal.launch.folder import locked, stopped_run

CACHES = ("weights", "store")  # of every node except the origin: another node has the same bytes


def clean_run(folder: Path) -> int:
    """Remove what a stopped run in `folder` does not need to be resumed. Returns the bytes freed.

    Raises FolderError for a folder that is no run or whose run is still going.
    """
    stopped_run(folder)
    keep_every = config_module.load(folder / "config.toml").learner.keep_every
    with locked(folder):
        return remove_caches(folder, keep_every)


def remove_caches(folder: Path, keep_every: int) -> int:
    """Remove weight caches, relay stores, older versions and older checkpoints. Returns the bytes freed.

    The origin's newest version is a delta of others, back to one that is stored whole: these stay.
    """
    before = used_bytes(folder)
    for node in folder.iterdir():
        if (node / "invite").is_file() and node.name != "origin":
            for name in CACHES:
                shutil.rmtree(node / name, ignore_errors=True)
    learner = folder / "learner"
    for old in sorted(learner.glob("versions/v*"))[:-1]:
        shutil.rmtree(old)
    for old in sorted(learner.glob("checkpoints/step-*"))[:-1]:
        if not keep_every or int(old.name.removeprefix("step-")) % keep_every:
            shutil.rmtree(old)
    whole = sorted(folder.glob("origin/store/v*/full"))
    for old in folder.glob("origin/store/v*") if whole else []:
        if old.name < whole[-1].parent.name:
            shutil.rmtree(old)
    return before - used_bytes(folder)

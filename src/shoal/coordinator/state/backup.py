"""A copy of a coordinator's folder that is itself one: `shoal coordinator --dir COPY` continues from there.

    pool.sqlite     by SQLite's online backup, so that the coordinator may be at work; checked
    nonces.sqlite   empty, of another boot: what was signed before the copy is opened is refused, so nothing is served twice
    the rest        copied: key, config, invites, tasks, rollout files, metrics

Invariant: the tables are copied first. Rollout files are named by their hashes and never change, so every file that the
copied tables name is there. A copy has its name only once it is complete.
Called by `shoal backup`. Left out: PostgreSQL and buckets, which have backups of their own; what happened after the copy.
"""

import shutil
from pathlib import Path

from shoal.coordinator.tables.connection import copy_sqlite, open_sqlite
from shoal.coordinator.tables.nonces import Nonces
from shoal.errors import UserError
from shoal.files import discard, fsync
from shoal.protocol.node import KEY

TABLES, NONCES = "pool.sqlite", "nonces.sqlite"
BOOT = "a backup"  # no machine's


class BackupError(UserError):
    """Nothing was copied, or what was copied is broken; the message says what to do."""


def back_up(folder: Path, copy: Path) -> int:
    """Copy a coordinator's folder, whether it is at work or not. Returns the bytes of the copy. Raises BackupError."""
    if not (folder / TABLES).is_file():
        raise BackupError(
            f"{folder} has no {TABLES}: name the folder of a coordinator that has run; if its state is in PostgreSQL, copy "
            "the folder, and back up the database with pg_dump"
        )
    if copy.exists():
        raise BackupError(f"{copy} exists; choose another name, such as one with today's date")
    copy.parent.mkdir(parents=True, exist_ok=True)
    unfinished = copy.with_name(f".{copy.name}.tmp")
    discard(unfinished)
    unfinished.mkdir(mode=0o700)
    _copy_tables(folder / TABLES, unfinished / TABLES)
    Nonces(open_sqlite(unfinished / NONCES, survives_power_cuts=False), boot=BOOT).connection.close()
    shutil.copytree(folder, unfinished, ignore=_unwanted, dirs_exist_ok=True)
    unfinished.chmod(0o700)  # the key is in it
    for path in unfinished.rglob("*"):
        fsync(path)
    unfinished.rename(copy)
    fsync(copy.parent)
    return sum(path.stat().st_size for path in copy.rglob("*") if path.is_file())


def _copy_tables(source: Path, target: Path) -> None:
    if (found := copy_sqlite(source, target)) != "ok":
        raise BackupError(f"{source} is damaged: {found}; go back to an older copy")


def _unwanted(folder: str, names: list[str]) -> set[str]:
    """Databases, which are copied otherwise, files that are not complete, and the folders of nodes (`shoal pool up`)."""
    nodes = {name for name in names if (Path(folder) / name / KEY).is_file()}
    return nodes | {name for name in names if ".sqlite" in name or (name.startswith(".") and name.endswith(".tmp"))}

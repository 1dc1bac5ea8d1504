"""The processes of a run on one machine (names, folders, commands), and the run's folder (lock, clean-up).

Invariants: at most one `shoal run` works in a folder at a time. The clean-up keeps everything that the user or a
resumed run needs.
"""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.preflight.estimate import share_threads
from shoal.cli.preflight.machine import used_bytes
from shoal.config import Config
from shoal.coordinator.folder import invited_nodes
from shoal.errors import UserError
from shoal.protocol.messages import Role

MEETING = "meet"  # name and folder of the meeting of the learner's sites
CACHES = ("weights", "store", "tasks")  # in a node's folder; all their bytes are in other nodes' folders too
LOCK = ".running"


@dataclass(frozen=True)
class RunProcess:
    name: str
    role: Role


def members(config: Config) -> Iterator[RunProcess]:
    """Yield every process except coordinator and meeting, in the order in which they start."""
    for name, role in invited_nodes(config).items():
        yield RunProcess("validator" if role == "validator" and config.validator.count == 1 else name, role)


# --- commands --------------------------------------------------------------------------------------------------------


def coordinator_command(run: str, out: Path, url: str) -> list[str]:
    """Return the coordinator's command line. `run`: the run's name or id. `url`: where the coordinator listens."""
    port = url.rpartition(":")[2]
    where = ["--dir", str(out / "coordinator"), "--record", str(out), "--no-report", "--threads", "1"]
    return ["coordinator", str(out / "config.toml"), "--run", run, "--port", port, *where]


def meeting_command(out: Path) -> list[str]:
    return ["pool", "meet", str(out / "config.toml"), "--dir", str(out / MEETING), "--threads", "1"]


def site_invites(config: Config, out: Path) -> list[Path]:
    """Return the paths of the invites that the meeting writes, one for each of the learner's sites."""
    return [out / MEETING / "invites" / f"site-{i}.invite" for i in range(config.learner.sites)]


def command(member: RunProcess, config: Config, out: Path, cores: int) -> list[str]:
    """Return the member's command line. `cores`: the number of cores that all roles share."""
    folder = out / member.name
    threads = share_threads(config, cores).get(member.role, 1)
    sites = config.learner.sites
    more = ["--watch", str(out / (MEETING if sites else "learner") / "versions")] if member.role == "origin" else []
    if member.role == "learner" and sites:
        more = ["--site", str(site_invites(config, out)[int(member.name.removeprefix("learner").lstrip("-") or 0)])]
    if member.role == "worker":
        engine = config.workers.engine(int(member.name.removeprefix("worker-")))
        more = ["--engine", engine] if engine != "torch" else []
    where = ["--dir", str(folder), "--threads", str(threads)]
    return [member.role, "--join", str(folder / "invite"), *more, *where]


# --- the folder of a run ---------------------------------------------------------------------------------------------


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder for this process. Raise UserError if another process has locked it."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"the run in {folder} is in progress; stop it first") from error
        yield


def remove_caches(folder: Path, config: Config) -> int:
    """Remove the nodes' caches, old checkpoints, and old rounds of the sites' meeting. Return the bytes freed.

    The origin's store is kept. Its manifests cannot be made again, because each is signed only once. A validator may
    still need its versions to check waiting submissions.
    """
    before = used_bytes(folder)
    for node in folder.iterdir():
        if (node / "invite").is_file() and node.name != "origin":
            for name in CACHES:
                shutil.rmtree(node / name, ignore_errors=True)
    for learner in (folder / each.name for each in members(config) if each.role == "learner"):
        for old in sorted(learner.glob("checkpoints/step-*"))[:-1]:
            shutil.rmtree(old)
    for name in ("state", "rounding", "average"):  # what the sites' meeting keeps for each round
        for path in sorted((folder / MEETING).glob(f"{name}-*.safetensors"))[:-1]:
            path.unlink()
    return before - used_bytes(folder)

"""The processes of a run on one machine: their names, folders, invites and commands.

Invariant: a member that is started again has the folder, the key and the invite it had before.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.preflight.estimate import share_threads
from shoal.config import Config
from shoal.protocol.identity import Identity
from shoal.protocol.invite import make_invite
from shoal.protocol.messages import Role

INVITE_S = 30 * 86_400
MEETING = "meet"  # name and folder of the meeting of the learner's sites


@dataclass(frozen=True)
class Member:
    name: str
    role: Role


def members(config: Config) -> Iterator[Member]:
    """Every process except coordinator and meeting, in the order in which they start."""
    for i in range(max(1, config.learner.sites)):
        yield Member(f"learner-{i}" if i else "learner", "learner")
    yield Member("origin", "origin")
    for i in range(config.relays.count):
        yield Member(f"relay-{i}", "relay")
    for i in range(config.validator.count):
        yield Member(f"validator-{i}" if config.validator.count > 1 else "validator", "validator")
    for i in range(config.workers.count):
        yield Member(f"worker-{i}", "worker")
    yield Member("evaluator", "evaluator")


def coordinator_command(run: str, out: Path, url: str) -> list[str]:
    port = url.rpartition(":")[2]
    where = ["--dir", str(out / "coordinator"), "--record", str(out), "--no-report", "--threads", "1"]
    return ["coordinator", str(out / "config.toml"), "--run", run, "--port", port, *where]


def meeting_command(out: Path) -> list[str]:
    return ["pool", "meet", str(out / "config.toml"), "--dir", str(out / MEETING), "--threads", "1"]


def site_invites(config: Config, out: Path) -> list[Path]:
    """The invites that the meeting writes, one for each of the learner's sites."""
    count = config.learner.sites
    return [out / MEETING / "invites" / f"site-{i}.invite" for i in range(count)]


def command(member: Member, config: Config, out: Path, cores: int) -> list[str]:
    """The member's command line; its folder and invite exist."""
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


def invite(member: Member, coordinator: Identity, run: str, url: str, out: Path) -> None:
    """Make the member's folder and invite, unless it has them: the coordinator knows it by the first."""
    folder = out / member.name
    folder.mkdir(mode=0o700, exist_ok=True)
    if not (folder / "invite").exists():
        expires_s = int(time.time()) + INVITE_S
        made = make_invite(coordinator, url=url, run=run, role=member.role, name=member.name, expires_s=expires_s)
        made.save(folder / "invite")

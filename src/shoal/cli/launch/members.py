"""The processes of a run on one machine: their names, folders, invites and commands.

Invariant: a member that is started again has the folder, the key and the invite it had before. Called by `swarm`.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from shoal.cli.preflight.cores import share_threads
from shoal.config import Cheat, Config
from shoal.protocol.identity import Identity
from shoal.protocol.invite import make_invite
from shoal.protocol.messages import Role

INVITE_S = 30 * 86_400
MEETING = "meet"  # name and folder of the meeting of the learner's sites


@dataclass(frozen=True)
class Member:
    name: str
    role: Role
    command: str  # the role, or the kind of cheat


def members(config: Config) -> Iterator[Member]:
    """Every process except coordinator and meeting, in the order in which they start."""
    for i in range(config.learner.sites.sites if config.learner.sites else 1):
        yield Member(f"learner-{i}" if i else "learner", "learner", "learner")
    yield Member("origin", "origin", "origin")
    for i in range(config.relays.count):
        yield Member(f"relay-{i}", "relay", "relay")
    for i in range(config.validator.count):
        yield Member(f"validator-{i}" if config.validator.count > 1 else "validator", "validator", "validator")
    for i in range(config.workers.count):
        yield Member(f"worker-{i}", "worker", "worker")
    cheats = config.workers.cheat
    for i, cheat in enumerate(cheats):
        yield Member(f"cheater-{i}" if len(cheats) > 1 else "cheater", "worker", cheat)
    yield Member("evaluator", "evaluator", "evaluator")


def module_of(command: str) -> str:
    """The module whose `main` takes this command."""
    return "shoal.adversary.cheats" if command in get_args(Cheat) else "shoal.cli"


def coordinator_command(run: str, out: Path, url: str) -> list[str]:
    port = url.rpartition(":")[2]
    where = ["--dir", str(out / "coordinator"), "--record", str(out), "--no-report", "--threads", "1"]
    return ["coordinator", str(out / "config.toml"), "--run", run, "--port", port, *where]


def meeting_command(out: Path) -> list[str]:
    return ["meet", str(out / "config.toml"), "--dir", str(out / MEETING), "--threads", "1"]


def site_invites(config: Config, out: Path) -> list[Path]:
    """The invites that the meeting writes, one for each of the learner's sites."""
    count = config.learner.sites.sites if config.learner.sites else 0
    return [out / MEETING / "invites" / f"site-{i}.invite" for i in range(count)]


def command(member: Member, config: Config, out: Path, cores: int) -> list[str]:
    """The member's command line; its folder and invite exist."""
    folder = out / member.name
    threads = share_threads(config, cores).get(member.role, 1)
    sites = config.learner.sites
    more = ["--watch", str(out / (MEETING if sites else "learner") / "versions")] if member.role == "origin" else []
    if member.role == "learner" and sites:
        more = ["--site", str(site_invites(config, out)[int(member.name.removeprefix("learner").lstrip("-") or 0)])]
    if member.role == "worker" and (engine := config.workers.engine(_number(member.name))) != "torch":
        more = ["--engine", engine]
    where = ["--dir", str(folder), "--threads", str(threads)]
    return [member.command, "--join", str(folder / "invite"), *more, *where]


def _number(name: str) -> int:
    """Of a worker, or of a cheater among the cheaters."""
    return int(name.rpartition("-")[2]) if "-" in name else 0


def invite(member: Member, coordinator: Identity, run: str, url: str, out: Path) -> None:
    """Make the member's folder and invite, unless it has them: the coordinator knows it by the first."""
    folder = out / member.name
    folder.mkdir(mode=0o700, exist_ok=True)
    if not (folder / "invite").exists():
        expires_s = int(time.time()) + INVITE_S
        made = make_invite(coordinator, url=url, run=run, role=member.role, name=member.name, expires_s=expires_s)
        made.save(folder / "invite")

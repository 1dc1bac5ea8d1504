"""`shoal pool up DIR`: the trusted roles of a pool on one machine, by the launcher of `shoal run`. Workers are elsewhere.

    DIR                what `shoal pool init` made: the coordinator's folder
    DIR/NAME           the folder of each process: learner, origin, relay-0, validator-0, evaluator
    DIR/logs/NAME.log  what it says

Invariant: it starts one process for each invite in DIR/invites that is not a worker's, and uses up no other. Started again,
it goes on where it stopped. Left out: workers, which join from their machines; sites (`shoal pool meet`).
"""

import math
import shlex
import shutil
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shoal.cli.launch.members import RunProcess
from shoal.cli.launch.swarm import Swarm
from shoal.config import Config
from shoal.errors import UserError
from shoal.protocol.history import Status
from shoal.protocol.invite import Address, open_payload, read_invite
from shoal.protocol.messages import Role

INVITES = "invites"
TRUSTED: tuple[Role, ...] = ("learner", "origin", "relay", "validator", "evaluator")  # in the order to start them
NEEDED = ("learner", "origin")
GOODBYE_S = 60.0  # for workers to hear that the run has finished
HERE_S = 15.0  # a node that was seen in this time may still ask
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where this machine reaches what listens on all its addresses


class PoolSwarm(Swarm):
    """`config` and `address` are those in `folder`."""

    def __init__(self, folder: Path, config: Config, address: Address, dashboard: int | None = None) -> None:
        """Raises UserError, InviteError."""
        if config.learner.sites:
            raise UserError("a learner with several sites is started by `shoal pool meet` and a command for each site")
        super().__init__(config, address.run, folder, local_url(config, address), dashboard=dashboard)
        self.coordinator = self.out
        self.invites = trusted_invites(self.out / INVITES)
        self.finished_s = math.inf

    def _resolve(self, found: dict[str, Any]) -> None:
        """The pool's config stays as it is: each machine measures its own dtype. No worker is here, or may be late."""
        workers = self.config.workers.model_copy(update={"count": 0})
        self.here, self.stall_s = self.config.model_copy(update={"workers": workers}), math.inf

    def _coordinator_command(self) -> list[str]:
        return ["coordinator", "--dir", str(self.out), "--no-report", "--threads", "1"]

    def _members(self) -> list[RunProcess]:
        return list(self.invites)

    def _invite(self, member: RunProcess) -> None:
        """Put the member's invite into its folder."""
        folder = self.out / member.name
        folder.mkdir(mode=0o700, exist_ok=True)
        if not (folder / "invite").exists():
            shutil.copy(self.invites[member], folder / "invite")  # with its mode, 0600

    def _start_all(self) -> None:
        super()._start_all()
        self._note(f"workers join with their invites in {self.out / INVITES}: shoal worker --join INVITE --dir worker")

    def _may_end(self, status: Status) -> bool:
        """Nodes elsewhere hear of the end by their next heartbeat; whoever was not seen lately has heard it, or is gone."""
        now_s, here = time.monotonic(), {member.name for member in self.invites}
        self.finished_s = min(self.finished_s, now_s)
        elsewhere = [node for node in status.nodes if node.name not in here and not node.evicted]
        left = all(status.now_s - node.seen_s > HERE_S for node in elsewhere)
        return left or now_s - self.finished_s > GOODBYE_S

    def _resuming(self) -> str:
        return f"shoal pool up {shlex.quote(str(self.out))}"

    def _training_more(self, steps: int) -> str:
        return f"set run.steps to {steps} in {self.out / 'config.toml'}, then: {self._resuming()}"


def local_url(config: Config, address: Address) -> str:
    """Where this machine reaches the pool's coordinator, whatever proxy others reach it by."""
    host = ANY.get(config.coordinator.host, config.coordinator.host)
    port = config.coordinator.port or urlsplit(address.url).port
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def trusted_invites(folder: Path) -> dict[RunProcess, Path]:
    """The invite of each process, by the process, in the order to start them. Raises UserError, InviteError."""
    found: dict[RunProcess, Path] = {}
    for path in sorted(folder.glob("*.invite")):
        invite = read_invite(str(path))
        payload = open_payload(invite.signed.model_dump_json(), invite.key, invite.run)
        if payload.role in TRUSTED:
            found[RunProcess(payload.name, payload.role)] = path
    for role in NEEDED:
        if (count := sum(member.role == role for member in found)) != 1:
            raise UserError(
                f"{folder} holds {count} invites for the role {role}, and `shoal pool up` starts one: make the pool with "
                "`shoal pool init`, or start each role by its own command"
            )
    return dict(sorted(found.items(), key=lambda entry: TRUSTED.index(entry[0].role)))

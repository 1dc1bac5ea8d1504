"""`shoal run`: start, watch and stop all processes of a run on this machine. `shoal pool up` does the same for a pool.

The processes run the same commands as separate machines would, and speak HTTP on loopback. This process holds no state
that the run needs, so if it is killed, its children end, and the run can be resumed.
Invariants: when `run` returns, no child is left. This process never imports torch.
"""

import json
import math
import os
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from shoal import config as config_module
from shoal.cli.launch import members
from shoal.cli.launch.children import Child, Children, Usage
from shoal.cli.launch.members import LOCK, RunProcess, locked, remove_caches
from shoal.cli.launch.process import Interrupted, listen, signals_interrupt
from shoal.cli.launch.watch import STALL_S, Watch
from shoal.cli.preflight.estimate import available_cores, memory_finding, needed_bytes
from shoal.cli.preflight.machine import (
    check_space,
    disk_finding,
    disk_needs,
    explain,
    free_bytes,
    free_memory,
    memory_bytes,
    used_bytes,
)
from shoal.config import Config
from shoal.coordinator.folder import INVITE_DAYS, INVITES, TASKS, create_invite
from shoal.errors import ShoalError, UserError
from shoal.files import copy_tree, discard, read_json, write_file
from shoal.protocol.history import PoolWatch, Status
from shoal.protocol.invite import Address, open_payload, read_invite
from shoal.protocol.messages import Role
from shoal.shardcast.server import url_of
from shoal.watch import figures
from shoal.watch.record import read_evaluations
from shoal.watch.summary import MODEL, SUMMARY, Leg, all_legs, read_legs, summary_table, write_legs, write_report
from shoal.watch.terminal.live import LiveView, Terminal

POLL_S = 0.3
PREPARE = "shoal.cli.launch.prepare"
HERE = "127.0.0.1"  # where the dashboard listens
START_S = 60.0  # time allowed for the coordinator, or the sites' meeting server, to start
TRUSTED: tuple[Role, ...] = ("learner", "origin", "relay", "validator", "evaluator")  # in the order to start them
NEEDED = ("learner", "origin")
END_S = 60.0  # limit for nodes on other machines to learn that the run has finished
ACTIVE_S = 15.0  # a node with a more recent heartbeat may not know yet that the run has finished
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # the loopback address for a server that listens on all addresses


class Swarm:
    """All processes of one run.

    `run`: its name; for a resumed run, its id. `url`: for a resumed run, where its coordinator must listen again,
    because its nodes know no other address. `dashboard`: its port; 0: any free port; None: no dashboard.
    """

    def __init__(self, config: Config, run: str, out: Path, url: str = "", dashboard: int | None = None) -> None:
        self.config = config
        self.local_config = config  # with the workers of this machine only
        self.stall_s = STALL_S
        self.run_name = run
        self.out = out.resolve()
        self.coordinator = self.out / "coordinator"  # its folder
        self.url = url
        self.resume = bool(url)
        self.console = Terminal()
        self.view = LiveView(self.console)
        self.cores = available_cores()
        self.children = Children(self.out / "logs", config.model.device)
        self.pool = PoolWatch(url, httpx.Client(timeout=5))
        self.usage = Usage()
        self.legs: list[Leg] = []
        self.dashboard = dashboard
        self.started_s = 0.0
        self.status: Status | None = None  # the newest
        self.members = list(members.members(config))

    def run(self) -> int:
        """Run to the end. Return the exit status. Raise ShoalError if the run cannot be finished."""
        if self.resume and self._is_finished():
            return 0
        self._make_folder()
        with locked(self.out):
            try:
                with signals_interrupt():
                    self._train()
            except Interrupted:
                self.console.print(f"stopped{self._how_to_resume()}", soft_wrap=True, highlight=False)
                return 130
            except (ShoalError, OSError) as error:
                raise ShoalError(f"{explain(error, self.out)}{self._how_to_resume()}") from error
            self._finish()
        return 0

    def _train(self) -> None:
        """Start everything and watch it until the run has finished. Leave no child."""
        self.started_s = time.monotonic()
        self.legs = [*read_legs(self.out), Leg()]
        try:
            if self.dashboard is not None:  # fail on a taken port before anything is prepared
                with listen(HERE, self.dashboard, "the dashboard") as listener:
                    self.dashboard = listener.getsockname()[1]
            self._prepare()
            self._start_all()
            self._watch()
        except Interrupted:
            self.console.print("stopping")
            raise
        finally:
            self.children.stop_all()
            self.pool.client.close()
            if self.children.all:
                self._save_leg()

    # --- before ------------------------------------------------------------------------------------------------------

    def _is_finished(self) -> bool:
        """Return whether the resumed run has nothing left to do; if so, print its summary."""
        finals = [evaluation.version for evaluation in read_evaluations(self.out) if evaluation.final]
        if not finals or max(finals) < self.config.run.steps or not (self.out / SUMMARY).exists():
            return False
        summary = read_json(self.out / SUMMARY)
        if summary["steps"] < max(finals):  # the last launch was killed before it wrote its summary
            return False
        self.console.print(summary_table(summary, self.out))
        more = self._training_more(max(finals) + self.config.run.steps)
        self.console.print(f"the run has trained its {max(finals)} steps; to train more: {more}", soft_wrap=True)
        return True

    def _make_folder(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            is_empty = not any(self.out.iterdir())
            was_prepared = (self.out / LOCK).exists() and not self._has_begun()
            if not (self.resume or is_empty or was_prepared):
                why = f"{self.out} is not empty; choose another folder with --out, or resume its run with --resume"
                raise ShoalError(why)
            (self.out / "logs").mkdir(exist_ok=True)
        except OSError as error:
            why = f"cannot write to {self.out}: {error.strerror}; choose another folder with --out"
            raise ShoalError(why) from error

    def _has_begun(self) -> bool:
        """Return whether the run's coordinator has listened: only then can the run be resumed."""
        return (self.coordinator / "coordinator.json").exists()

    def _prepare(self) -> None:
        """Build the tasks, fetch the model, choose the dtype, check disk space; save the resolved config with the run."""
        requested = self.out / "requested.toml"  # config.toml is replaced only by a config that passes `prepare`
        write_file(requested, config_module.dumps(self.config).encode())
        self._note(f"preparing {self.config.model.name} (the first time takes a minute)")
        if not self.resume:
            discard(self.coordinator / TASKS)  # left by a failed preparation, whose source files may have changed since
        kept = ["--tasks", str(self.coordinator / TASKS)]
        try:
            output = self.children.run("prepare", [str(requested), "--threads", str(self.cores), *kept], PREPARE)
        finally:
            requested.unlink()
        prepared = json.loads(output)
        self._resolve(prepared)
        for note in prepared["tasks"]["notes"]:
            self._note(f"tasks: {note}")
        measured = ", ".join(f"{name} {speed:.0f}" for name, speed in prepared["gflops"].items())
        self._note(f"computing in {prepared['dtype']}" + (f" (GFLOP/s: {measured})" if measured else ""))
        needs, free = disk_needs(self.local_config, prepared["parameters"]), free_bytes(self.out)
        needed = needed_bytes(self.local_config, prepared["dtype"], prepared["prompt_tokens"])
        self._note(memory_finding(needed, memory_bytes(), free_memory()).line())
        self._note(disk_finding(needs, free).line())
        check_space(self.out, needs, free)

    def _resolve(self, prepared: dict[str, Any]) -> None:
        """Save the config with the dtype for this machine and the digest of the tasks."""
        model = self.config.model.model_copy(update={"dtype": prepared["dtype"]})
        tasks = self.config.tasks.model_copy(update={"digest": prepared["tasks"]["digest"]})
        self.config = self.local_config = self.config.model_copy(update={"model": model, "tasks": tasks})
        write_file(self.out / "config.toml", config_module.dumps(self.config).encode())

    # --- starting ----------------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        command = self._coordinator_command()
        self.pool.url = self.url
        self.watch = Watch(self.out, self.pool, stall_s=self.stall_s)
        child = self.children.start("coordinator", command)
        self._wait_for(child, "the coordinator", lambda: self.watch.look() is not None)
        if self.config.learner.sites:
            child = self.children.start(members.MEETING, members.meeting_command(self.out))
            invites = members.site_invites(self.config, self.out)
            self._wait_for(child, "the sites' meeting", lambda: all(path.exists() for path in invites))
        for member in self.members:
            self._invite(member)
        for member in self.members:
            self.children.start(member.name, members.command(member, self.local_config, self.out, self.cores))
        if self.dashboard is not None:
            self.children.start("dashboard", ["dashboard", str(self.out), "--port", str(self.dashboard)], optional=True)
            self._note(f"dashboard: http://{HERE}:{self.dashboard}/")

    def _coordinator_command(self) -> list[str]:
        """Return the coordinator's command line; set `url` if it is not known yet."""
        host = self.config.coordinator.host
        if not self.url:
            self.url = url_of(host, self.config.coordinator.port or _free_port(host))
        return members.coordinator_command(self.run_name, self.out, self.url)

    def _invite(self, member: RunProcess) -> None:
        """Make the member's folder and invite if missing. The coordinator knows a member by its first invite."""
        folder = self.out / member.name
        folder.mkdir(mode=0o700, exist_ok=True)
        if not (folder / "invite").exists():
            self._write_invite(member, folder / "invite")

    def _write_invite(self, member: RunProcess, path: Path) -> None:
        create_invite(self.coordinator, member.role, member.name, None, INVITE_DAYS).save(path)

    def _wait_for(self, child: Child, what: str, ready: Callable[[], bool]) -> None:
        """Raise ShoalError if `what` ends, or is not ready in time."""
        deadline_s = time.monotonic() + START_S
        while not ready():
            if child.exit_status() is not None:
                raise ShoalError(f"{what} did not start: {child.last_error()}")
            if time.monotonic() > deadline_s:
                raise ShoalError(f"{what} did not start within {START_S:.0f} s; see {child.log}")
            time.sleep(0.1)

    # --- watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Show the state, restart processes that died, and measure memory, until the last version is evaluated and the
        learner has written its model."""
        with self.view:
            while True:
                status = self.watch.look()
                if status is not None:
                    self.status = status
                    self.view.update(status, self.pool.history, self._wall_s())
                    if status.state == "finished" and self._trained_model() is not None and self._may_end(status):
                        return
                if self.usage.measure(self.children.pids() | {"shoal run": os.getpid()}):
                    self._save_leg()
                self.children.revive(self._say)
                self.watch.check()
                time.sleep(POLL_S)

    def _may_end(self, status: Status) -> bool:
        """Return whether no other machine still needs the coordinator. Here all nodes are children, so none does."""
        return True

    def _wall_s(self) -> float:
        """Return the run's time so far, including that before it was resumed."""
        return all_legs(self.legs[:-1]).wall_s + time.monotonic() - self.started_s

    def _save_leg(self) -> None:
        """Write the figures since the start or the resume, so that they survive this process."""
        self.legs[-1] = Leg(
            wall_s=time.monotonic() - self.started_s,
            restarts=self.children.restarts(),
            peak_rss_bytes=self.usage.rss_bytes,
            peak_together_bytes=self.usage.together_bytes,
            cpu_s=self.usage.cpu_s(),
        )
        write_legs(self.out, self.legs)

    def _say(self, line: str) -> None:
        """Print a line, and append it to the run's log."""
        self.view.log(line)
        with (self.out / "logs" / "run.log").open("a") as log:
            log.write(f"{time.strftime('%H:%M:%S')} {line}\n")

    def _note(self, line: str) -> None:
        self.console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)

    # --- ending ------------------------------------------------------------------------------------------------------

    def _trained_model(self) -> Path | None:
        """Return the folder of the trained model; None until a learner, or one of its sites, has written it and ended."""
        names = [member.name for member in self.members if member.role == "learner"]
        return next((self.out / name / MODEL for name in names if self.children.has_ended(name)), None)

    def _how_to_resume(self) -> str:
        return f"; resume with: {self._resuming()}" if self._has_begun() else ""

    def _resuming(self) -> str:
        """Return the shell command that resumes the run."""
        return f"shoal run --resume {shlex.quote(str(self.out))}"

    def _training_more(self, steps: int) -> str:
        return f"{self._resuming()} --set run.steps={steps}"

    def _finish(self) -> None:
        """Copy the trained model, write the report, print the summary, and remove the caches."""
        assert self.status is not None
        trained = self._trained_model()
        assert trained is not None
        shutil.rmtree(self.out / MODEL, ignore_errors=True)  # exists if the run was resumed with more steps
        copy_tree(trained, self.out / MODEL)
        legs, history = all_legs(self.legs), self.pool.history
        summary = write_report(self.out, config=self.config, status=self.status, history=history, measured=legs)
        freed = remove_caches(self.out, self.config)
        self.console.print(summary_table(summary, self.out))
        self._note(f"to look again: shoal dashboard {shlex.quote(str(self.out))} (--out FILE writes one HTML file)")
        self._note(f"disk: {figures.memory(freed)} of caches freed, {figures.memory(used_bytes(self.out))} kept")


def _free_port(host: str) -> int:
    with listen(host, 0, "the coordinator") as probe:
        port: int = probe.getsockname()[1]
        return port


# --- a pool ----------------------------------------------------------------------------------------------------------


class PoolSwarm(Swarm):
    """The coordinator and the trusted roles of a pool in `folder`, which `shoal pool init` made.

        folder                the coordinator's folder
        folder/NAME           the folder of a node: learner, origin, relay-0, validator-0, evaluator
        folder/logs/NAME.log  its log

    Invariant: it starts one process for each invite in folder/invites that is not a worker's, and uses no other invite.
    After a restart it continues where it stopped. Left out: a learner at several sites (`shoal pool meet`).
    """

    def __init__(self, folder: Path, config: Config, address: Address, dashboard: int | None = None) -> None:
        """Raise UserError, InviteError."""
        if config.learner.sites:
            raise UserError("a learner with several sites is started by `shoal pool meet` and a command for each site")
        super().__init__(config, address.run, folder, local_url(config, address), dashboard=dashboard)
        self.coordinator = self.out
        self.invites = _trusted_invites(self.out / INVITES)
        self.members = list(self.invites)
        self.finished_s = math.inf

    def _resolve(self, prepared: dict[str, Any]) -> None:
        """Keep the pool's config, because each machine picks its own dtype.

        Do not stop a run that stalls, because its workers run elsewhere.
        """
        workers = self.config.workers.model_copy(update={"count": 0})
        self.local_config, self.stall_s = self.config.model_copy(update={"workers": workers}), math.inf

    def _coordinator_command(self) -> list[str]:
        return ["coordinator", "--dir", str(self.out), "--no-report", "--threads", "1"]

    def _write_invite(self, member: RunProcess, path: Path) -> None:
        shutil.copy(self.invites[member], path)  # with its mode, 0600

    def _start_all(self) -> None:
        super()._start_all()
        self._note(f"workers join with their invites in {self.out / INVITES}: shoal worker --join INVITE --dir worker")

    def _may_end(self, status: Status) -> bool:
        """Return whether all nodes elsewhere have stopped (the coordinator told them "finished"), or END_S has passed."""
        now_s, here = time.monotonic(), {member.name for member in self.members}
        self.finished_s = min(self.finished_s, now_s)
        elsewhere = [node for node in status.nodes if node.name not in here and not node.evicted]
        all_ended = all(status.now_s - node.seen_s > ACTIVE_S for node in elsewhere)
        return all_ended or now_s - self.finished_s > END_S

    def _resuming(self) -> str:
        return f"shoal pool up {shlex.quote(str(self.out))}"

    def _training_more(self, steps: int) -> str:
        return f"set run.steps to {steps} in {self.out / 'config.toml'}, then: {self._resuming()}"


def local_url(config: Config, address: Address) -> str:
    """Return the URL of the pool's coordinator on this machine, without the proxy that others may use."""
    host = ANY.get(config.coordinator.host, config.coordinator.host)
    return url_of(host, config.coordinator.port or urlsplit(address.url).port or 80)


def _trusted_invites(folder: Path) -> dict[RunProcess, Path]:
    """Return the invite of each process that is not a worker, in the order to start them. Raise UserError, InviteError."""
    invites: dict[RunProcess, Path] = {}
    for path in sorted(folder.glob("*.invite")):
        invite = read_invite(str(path))
        payload = open_payload(invite.signed.model_dump_json(), invite.key, invite.run)
        if payload.role in TRUSTED:
            invites[RunProcess(payload.name, payload.role)] = path
    for role in NEEDED:
        if (count := sum(member.role == role for member in invites)) != 1:
            raise UserError(
                f"{folder} holds {count} invites for the role {role}, but `shoal pool up` starts exactly one: "
                "make the pool with `shoal pool init`, or start each role with its own command"
            )
    return dict(sorted(invites.items(), key=lambda entry: TRUSTED.index(entry[0].role)))

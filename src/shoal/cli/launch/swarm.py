"""`shoal run`: starts every process of a run on this machine, watches them, and stops them. `pool` starts a pool's with it.

The processes are the same commands that run on separate machines, and they speak HTTP on loopback. This one holds no state
that a run needs: it can be killed, and its children end with it.
Invariant: when it returns, no child is left. It never imports torch.
"""

import json
import os
import shlex
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from shoal import config as config_module
from shoal.cli.launch import members
from shoal.cli.launch.children import Child, Children, MemoryPeaks
from shoal.cli.launch.members import RunProcess, locked, remove_caches
from shoal.cli.launch.process import Interrupted, listen, signals_interrupt
from shoal.cli.launch.watch import STALL_S, Watch
from shoal.cli.preflight import disk
from shoal.cli.preflight.estimate import Forecast, available_cores, findings, forecast
from shoal.cli.preflight.machine import free_bytes
from shoal.config import Config
from shoal.errors import ShoalError
from shoal.files import copy_tree, write_file
from shoal.protocol.history import PoolWatch, Status
from shoal.protocol.identity import Identity
from shoal.protocol.invite import run_id
from shoal.watch import figures
from shoal.watch.record import read_evaluations, trained_steps
from shoal.watch.summary import MODEL, SUMMARY, Leg, all_legs, read_legs, summary_table, write_legs, write_report
from shoal.watch.terminal.live import LiveView, Terminal

POLL_S = 0.3
PREPARE = "shoal.cli.launch.prepare"
HERE = "127.0.0.1"  # where the dashboard is
START_S = 60.0  # for the coordinator to listen


class Swarm:
    """`address`: where the coordinator of a resumed run listened. Its members know no other address.

    `dashboard`: the port of the page that shows the run; 0: any that is free; None: no page.
    """

    def __init__(self, config: Config, run: str, out: Path, address: str = "", dashboard: int | None = None) -> None:
        self.config = config
        self.here = config  # of what runs on this machine
        self.stall_s = STALL_S
        self.run_name = run
        self.out = out.resolve()
        self.coordinator = self.out / "coordinator"  # its folder
        self.url = address
        self.resume = bool(address)
        self.console = Terminal()
        self.view = LiveView(self.console)
        self.cores = available_cores()
        self.children = Children(self.out / "logs", config.model.device)
        self.pool = PoolWatch(address, httpx.Client(timeout=5))
        self.peaks = MemoryPeaks()
        self.legs: list[Leg] = []
        self.dashboard = dashboard
        self.started_s = 0.0
        self.status: Status | None = None  # the newest
        self.estimate: Forecast | str = ""

    def run(self) -> int:
        """The whole run. Returns the exit status. Raises ShoalError if the run could not be finished."""
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
                raise ShoalError(f"{disk.explain(error, self.out)}{self._how_to_resume()}") from error
            self._finish()
        return 0

    def _train(self) -> None:
        """Start everything and watch it until the run has finished. No child is left afterwards."""
        self.started_s = time.monotonic()
        self.legs = [*read_legs(self.out), Leg()]
        try:
            if self.dashboard is not None:  # first: a port that is taken costs no start
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
        """Whether the resumed run has nothing left to do; says so."""
        finals = [found.version for found in read_evaluations(self.out) if found.final]
        if not finals or max(finals) < self.config.run.steps or not (self.out / SUMMARY).exists():
            return False
        summary = json.loads((self.out / SUMMARY).read_text())
        if summary["steps"] < max(finals):  # of an earlier leg: the last one was killed before it wrote its own
            return False
        self.console.print(summary_table(summary, self.out))
        more = self._training_more(max(finals) + self.config.run.steps)
        self.console.print(f"the run has trained its {max(finals)} steps; to train more: {more}", soft_wrap=True)
        return True

    def _make_folder(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if not self.resume and any(self.out.iterdir()):
                raise ShoalError(
                    f"{self.out} is not empty; choose another folder with --out, or resume it with --resume"
                )
            (self.out / "logs").mkdir(exist_ok=True)
        except OSError as error:
            raise ShoalError(
                f"cannot write to {self.out}: {error.strerror}; choose another folder with --out"
            ) from error

    def _prepare(self) -> None:
        """Build the tasks, fetch the model, measure the dtype, check the disk; save the resolved config with the run."""
        asked = self.out / "asked.toml"  # a resumed run keeps the config it has until this one proves right
        write_file(asked, config_module.dumps(self.config).encode())
        self._note(f"preparing {self.config.model.name} (the first time takes a minute)")
        kept = ["--tasks", str(self.coordinator / "tasks")]
        try:
            prepared = self.children.run("prepare", [str(asked), "--threads", str(self.cores), *kept], PREPARE)
        finally:
            asked.unlink()
        found = json.loads(prepared)
        self._resolve(found)
        for note in found["tasks"]["notes"]:
            self._note(f"tasks: {note}")
        measured = ", ".join(f"{name} {speed:.0f}" for name, speed in found["gflops"].items())
        self._note(f"computing in {found['dtype']}" + (f" (GFLOP/s: {measured})" if measured else ""))
        needs, free = disk.needs(self.here, found["parameters"]), free_bytes(self.out)
        self.estimate = forecast(self.here, found, self.cores, trained=trained_steps(self.out))
        for finding in (*findings(self.estimate), disk.finding(needs, free)):
            self._note(finding.line())
        disk.check_space(self.out, needs, free)

    def _resolve(self, found: dict[str, Any]) -> None:
        """Save the config with what was found on this machine: all of the run is here."""
        model = self.config.model.model_copy(update={"dtype": found["dtype"]})
        tasks = self.config.tasks.model_copy(update={"digest": found["tasks"]["digest"]})
        self.config = self.here = self.config.model_copy(update={"model": model, "tasks": tasks})
        write_file(self.out / "config.toml", config_module.dumps(self.config).encode())

    # --- starting ----------------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        command = self._coordinator_command()
        self.pool.url = self.url
        self.watch = Watch(self.here, self.out, self.pool, stall_s=self.stall_s)
        self._wait_for_coordinator(self.children.start("coordinator", command))
        if self.config.learner.sites:
            self._wait_for_meeting(self.children.start(members.MEETING, members.meeting_command(self.out)))
        for member in self._members():
            self._invite(member)
        for name, command in self.plan():
            self.children.start(name, command)
        if self.dashboard is not None:
            self.children.start("dashboard", ["dashboard", str(self.out), "--port", str(self.dashboard)], spare=True)
            self._note(f"dashboard: http://{HERE}:{self.dashboard}/")

    def plan(self) -> Iterator[tuple[str, list[str]]]:
        """Every process but coordinator and meeting, in the order to start them: name and command line."""
        for member in self._members():
            yield member.name, members.command(member, self.here, self.out, self.cores)

    def _coordinator_command(self) -> list[str]:
        """Its command line; from now on the run has its name and its address."""
        host = self.config.coordinator.host
        if not self.url:
            self.url = f"http://{host}:{self.config.coordinator.port or _free_port(host)}"
        self.run_name = run_id(self.run_name, self._identity().public)
        return members.coordinator_command(self.run_name, self.out, self.url)

    def _identity(self) -> Identity:
        return Identity.load_or_create(self.coordinator / "identity.pem")

    def _members(self) -> list[RunProcess]:
        """Every other process."""
        return list(members.members(self.config))

    def _invite(self, member: RunProcess) -> None:
        members.invite(member, self._identity(), self.run_name, self.url, self.out)

    def _wait_for_coordinator(self, coordinator: Child) -> None:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            if coordinator.exit_status() is not None:
                raise ShoalError(f"the coordinator did not start: {coordinator.last_words()}")
            if self.watch.look() is not None:
                return
            time.sleep(0.1)
        raise ShoalError(
            f"the coordinator did not answer at {self.url} within {START_S:.0f} s; see {self.out / 'logs'}"
        )

    def _wait_for_meeting(self, meeting: Child) -> None:
        deadline_s = time.monotonic() + START_S
        while not all(path.exists() for path in members.site_invites(self.config, self.out)):
            if meeting.exit_status() is not None:
                raise ShoalError(f"the sites' meeting did not start: {meeting.last_words()}")
            if time.monotonic() > deadline_s:
                raise ShoalError(f"the sites' meeting did not start within {START_S:.0f} s; see {meeting.log}")
            time.sleep(0.1)

    # --- watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Show the state, restart processes that died, and measure, until the last version is evaluated and the learner
        has left its model."""
        with self.view:
            while True:
                status = self.watch.look()
                if status is not None:
                    self.status = status
                    self.view.update(status, self.pool.history, self._wall_s())
                    if status.state == "finished" and self._trained() is not None and self._may_end(status):
                        return
                self._measure()
                self.children.revive(self._say)
                self.watch.check()
                time.sleep(POLL_S)

    def _may_end(self, status: Status) -> bool:
        """Whether nobody else needs a finished run's coordinator: every process is this one's child."""
        return True

    def _measure(self) -> None:
        """Keep the figures of this leg on disk, so that they survive this process."""
        if self.peaks.measure(self.children.pids() | {"shoal run": os.getpid()}):
            self._save_leg()

    def _wall_s(self) -> float:
        """What the run has taken so far, all its legs together."""
        return all_legs(self.legs[:-1]).wall_s + time.monotonic() - self.started_s

    def _save_leg(self) -> None:
        self.legs[-1] = Leg(
            wall_s=time.monotonic() - self.started_s,
            restarts=self.children.restarts(),
            peak_rss_bytes=self.peaks.rss_bytes,
            peak_together_bytes=self.peaks.together_bytes,
            estimated_s=0.0 if isinstance(self.estimate, str) else self.estimate.seconds,
            estimated_bytes=0.0 if isinstance(self.estimate, str) else self.estimate.memory_bytes,
        )
        write_legs(self.out, self.legs)

    def _say(self, line: str) -> None:
        """Tell the person who watches, and whoever reads the logs later."""
        self.view.log(line)
        with (self.out / "logs" / "run.log").open("a") as log:
            log.write(f"{time.strftime('%H:%M:%S')} {line}\n")

    def _note(self, line: str) -> None:
        self.console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)

    # --- ending ------------------------------------------------------------------------------------------------------

    def _trained(self) -> Path | None:
        """The model that the learner left when it ended; all of its sites leave the same one."""
        names = [member.name for member in self._members() if member.role == "learner"]
        return next((self.out / name / MODEL for name in names if self.children.has_ended(name)), None)

    def _how_to_resume(self) -> str:
        if not (self.coordinator / "coordinator.json").exists():
            return ""
        return f"; resume with: {self._resuming()}"

    def _resuming(self) -> str:
        """The command line, to be pasted into a shell."""
        return f"shoal run --resume {shlex.quote(str(self.out))}"

    def _training_more(self, steps: int) -> str:
        return f"{self._resuming()} --set run.steps={steps}"

    def _finish(self) -> None:
        """The trained model, the report and the table; then free what is no longer needed."""
        assert self.status is not None
        trained = self._trained()
        assert trained is not None
        shutil.rmtree(self.out / MODEL, ignore_errors=True)  # of a run that is resumed with more steps
        copy_tree(trained, self.out / MODEL)
        legs, history = all_legs(self.legs), self.pool.history
        summary = write_report(self.out, config=self.config, status=self.status, history=history, measured=legs)
        freed = remove_caches(self.out, self.config)
        self.console.print(summary_table(summary, self.out))
        self._note(f"look again: shoal dashboard {shlex.quote(str(self.out))} (--out FILE: as one HTML file)")
        self._note(f"disk: {figures.memory(freed)} of caches freed, {figures.memory(disk.used_bytes(self.out))} kept")


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port

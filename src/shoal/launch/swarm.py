"""`shoal run`: starts every process of a run on this machine, watches them, and stops them.

The processes are the same commands that run on separate machines, speaking HTTP on loopback. This one holds no state that
a run needs: it can be killed, and its children end with it.
Invariant: when it returns, no child is left. Called by `cli`. It never imports torch.
"""

import json
import os
import shutil
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import httpx
from rich.console import Console

from shoal import config as config_module
from shoal.config import Cheat, Config
from shoal.errors import ShoalError
from shoal.launch.children import Child, Children
from shoal.launch.cores import available_cores, share_threads
from shoal.launch.memory import Peaks
from shoal.launch.process import Interrupted, signals_interrupt
from shoal.protocol.history import RunHistory
from shoal.protocol.identity import Identity
from shoal.protocol.invite import make_invite
from shoal.protocol.messages import Role, Status
from shoal.protocol.watch import PoolWatch, UnreachableError
from shoal.tracking.report import summary_table, write_report
from shoal.view import LiveView

POLL_S = 0.3
START_S = 60.0  # for the coordinator to listen
INVITE_S = 30 * 86_400


class SwarmError(ShoalError):
    """The run could not start or go on; the message says why and where to look."""


@dataclass
class Seen:
    """What the watch remembers from one look to the next."""

    status: Status | None = None
    history: RunHistory = field(default_factory=RunHistory)
    progress: tuple[int, int] = (-1, -1)
    progress_s: float = field(default_factory=time.monotonic)
    peaks: Peaks = field(default_factory=Peaks)


def stopped_run(folder: Path) -> tuple[str, str]:
    """(name, coordinator's address) of the run in `folder`. Raises SwarmError where there is none."""
    try:
        found = json.loads((folder / "coordinator" / "coordinator.json").read_text())
        return found["run"], found["url"]
    except (OSError, ValueError, KeyError) as error:
        raise SwarmError(f"{folder} holds no run to go on with: its coordinator never listened") from error


class Swarm:
    """`address` is where the coordinator of a run that goes on listened: its members know no other."""

    def __init__(self, config: Config, run: str, out: Path, address: str = "") -> None:
        self.config = config
        self.run_name = run
        self.out = out.resolve()
        self.url = address
        self.resume = bool(address)
        self.client = httpx.Client(timeout=5)
        self.watch = PoolWatch(address, self.client)
        self.console = Console()
        self.cores = available_cores(config.run.threads)
        self.children = Children(self.out / "logs", config.run.max_restarts, config.model.device)
        self.seen = Seen(history=self.watch.history)
        self.view = LiveView(self.console)

    def run(self) -> int:
        """The whole run. Returns the exit status.

        Raises SwarmError or ChildError where the run could not be finished.
        """
        started_s = time.monotonic()
        self._make_folder()
        with signals_interrupt():
            try:
                self.config = self._prepare()
                self._start_all()
                self._watch()
            except Interrupted:
                self.console.print("stopping")
                return 130
            finally:
                self.children.stop_all()
                self.client.close()
        self._finish(time.monotonic() - started_s)
        return 0

    # --- before ------------------------------------------------------------------------------------------------------

    def _make_folder(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if not self.resume and any(self.out.iterdir()):
                raise SwarmError(f"{self.out} is not empty; choose another folder with --out, or go on with --resume")
            (self.out / "logs").mkdir(exist_ok=True)
        except OSError as error:
            raise SwarmError(
                f"cannot write to {self.out}: {error.strerror}; choose another folder with --out"
            ) from error

    def _prepare(self) -> Config:
        """Model and dtype, found by a process of its own; the resolved config is saved with the run."""
        path = self.out / "config.toml"
        path.write_text(config_module.dumps(self.config))
        self.console.print(f"[dim]preparing {self.config.model.name} (the first time takes a minute)[/dim]")
        words = self.children.run("prepare", ["prepare", str(path), "--threads", str(self.cores)])
        found = json.loads(words)
        model = self.config.model.model_copy(update={"dtype": found["dtype"]})
        resolved = self.config.model_copy(update={"model": model})
        path.write_text(config_module.dumps(resolved))
        measured = ", ".join(f"{name} {speed:.0f}" for name, speed in found["gflops"].items())
        self.console.print(
            f"[dim]computing in {found['dtype']}" + (f" (GFLOP/s: {measured})" if measured else "") + "[/dim]"
        )
        return resolved

    # --- starting ----------------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        identity = Identity.load_or_create(self.out / "coordinator" / "identity.pem")
        host = self.config.coordinator.host
        if not self.url:
            self.url = f"http://{host}:{self.config.coordinator.port or _free_port(host)}"
        self.watch.url = self.url
        port = self.url.rpartition(":")[2]
        command = ["coordinator", str(self.out / "config.toml"), "--run", self.run_name, "--port", port]
        command += ["--record", str(self.out)]
        self._wait_for(self._add("coordinator", *command, threads=1))

        threads = share_threads(self.config, self.cores)

        def add(role: Role, name: str, *more: str, cheat: str = "") -> None:
            folder = self.out / name
            folder.mkdir(mode=0o700, exist_ok=self.resume)
            if not (folder / "invite").exists():  # a member that comes again is known by the one it has
                expires_s = int(time.time()) + INVITE_S
                invite = make_invite(
                    identity, url=self.url, run=self.run_name, role=role, name=name, expires_s=expires_s
                )
                invite.save(folder / "invite")
            self._add(name, cheat or role, "--join", str(folder / "invite"), *more, threads=threads.get(role, 1))

        add("learner", "learner")
        add("origin", "origin", "--watch", str(self.out / "learner" / "versions"))
        for i in range(self.config.relays.count):
            add("relay", f"relay-{i}")
        for i in range(self.config.validator.count):
            add("validator", f"validator-{i}" if self.config.validator.count > 1 else "validator")
        for i in range(self.config.workers.count):
            add("worker", f"worker-{i}")
        lies = self.config.workers.cheat
        for i, lie in enumerate(lies):
            add("worker", f"cheater-{i}" if len(lies) > 1 else "cheater", cheat=lie)
        add("evaluator", "evaluator")

    def _add(self, name: str, *command: str, threads: int) -> Child:
        module = "shoal.adversary.cheats" if command[0] in get_args(Cheat) else "shoal.cli"
        return self.children.start(name, [*command, "--dir", str(self.out / name), "--threads", str(threads)], module)

    def _wait_for(self, coordinator: Child) -> None:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            if coordinator.exit_status() is not None:
                raise SwarmError(f"the coordinator did not start: {coordinator.last_words()}")
            if self._look() is not None:
                return
            time.sleep(0.1)
        raise SwarmError(
            f"the coordinator did not answer at {self.url} within {START_S:.0f} s; see {self.out / 'logs'}"
        )

    # --- watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until the last version is evaluated: show the state, restart what died, keep the metrics."""
        with self.view as view:
            while True:
                status = self._look()
                if status is not None:
                    view.update(status, self.seen.history)
                    self._remember(status)
                    if status.state == "finished":
                        return
                self.children.revive(self._say)
                stalled_s = time.monotonic() - self.seen.progress_s
                if stalled_s > self.config.run.stall_s:
                    raise SwarmError(f"nothing was accepted or trained for {stalled_s:.0f} s; {self._who_waits()}")
                time.sleep(POLL_S)

    def _look(self) -> Status | None:
        """The coordinator's view of the run; None while it is away (it may be restarting)."""
        try:
            return self.watch.look()
        except UnreachableError:
            return None

    def _remember(self, status: Status) -> None:
        seen = self.seen
        seen.peaks.weigh(self.children.pids() | {"shoal run": os.getpid()})
        known = len(seen.history.metrics) + len(seen.history.evaluations)
        progress = (known, sum(node.accepted for node in status.nodes))
        if progress != seen.progress:
            seen.progress, seen.progress_s = progress, time.monotonic()
        seen.status = status

    def _say(self, line: str) -> None:
        """Tell the person who watches, and who reads the logs later."""
        self.view.log(line)
        with (self.out / "logs" / "run.log").open("a") as log:
            log.write(f"{time.strftime('%H:%M:%S')} {line}\n")

    def _who_waits(self) -> str:
        nodes = self.seen.status.nodes if self.seen.status else []
        waiting = [f"{node.name} is waiting for {node.stats.doing}" for node in nodes if node.stats.waiting]
        return "; ".join(waiting) or f"see {self.out / 'logs'}"

    # --- ending ------------------------------------------------------------------------------------------------------

    def _finish(self, wall_s: float) -> None:
        """The trained model, the report and the table."""
        versions = sorted((self.out / "learner" / "versions").glob("v*"))
        shutil.rmtree(self.out / "model", ignore_errors=True)  # of a run that is resumed with more steps
        shutil.copytree(versions[-1], self.out / "model")
        status = self.seen.status
        if status is None:
            raise SwarmError(f"the coordinator was never heard of; see {self.out / 'logs'}")
        summary = write_report(
            self.out,
            config=self.config,
            status=status,
            history=self.seen.history,
            seed=self.config.run.seed,
            wall_s=wall_s,
            restarts=self.children.restarts(),
            peak_rss_bytes=self.seen.peaks.rss_bytes,
            peak_together_bytes=self.seen.peaks.together_bytes,
        )
        self.console.print(summary_table(summary, self.out))


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port

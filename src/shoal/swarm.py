"""`shoal run`: starts every process of a run on this machine, watches them, and stops them.

The processes are the same commands that run on separate machines, speaking HTTP on loopback. This one holds no state that
a run needs: it can be killed, and its children end with it.
Invariant: when it returns, no child is left. Called by `cli`. It never imports torch.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import httpx
from pydantic import ValidationError
from rich.console import Console

from shoal import config as config_module
from shoal.config import Config
from shoal.messages import Role, Status
from shoal.pool.identity import Identity
from shoal.pool.invite import make_invite
from shoal.report import summary_table, write_report
from shoal.view import LiveView

POLL_S = 0.3
WEIGH_S = 1.0  # between two measurements of memory
START_S = 60.0  # for the coordinator to listen
STOP_S = 10.0  # between SIGTERM and SIGKILL
LONGEST_BACKOFF_S = 8.0
INVITE_S = 30 * 86_400
EVICTED, USAGE = 3, 2  # exit statuses of a child, see cli


class SwarmError(Exception):
    """The run could not start or go on; the message says why and where to look."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""


@dataclass
class Child:
    """One process, and what it takes to start it again."""

    name: str
    argv: list[str]
    log: Path
    restarts: int = 0
    start_at_s: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    ended: bool = False  # on purpose: done, or evicted

    def start(self, environment: dict[str, str]) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][-300:] if lines else "nothing in its log"


@dataclass
class Seen:
    """What the watch remembers from one look to the next."""

    status: Status | None = None
    progress: tuple[int, int] = (-1, -1)
    progress_s: float = field(default_factory=time.monotonic)
    rss_bytes: dict[str, int] = field(default_factory=dict)  # each process's own peak
    together_bytes: int = 0  # the most that all processes held at one moment, shared pages counted once
    weighed_s: float = 0.0


class Swarm:
    def __init__(self, config: Config, name: str, out: Path) -> None:
        self.config = config
        self.name = name
        self.out = out.resolve()
        self.console = Console()
        self.children: list[Child] = []
        self.seen = Seen()
        self.url = ""

    def run(self) -> int:
        """The whole run. Returns the exit status; raises SwarmError where it could not be finished."""
        started_s = time.monotonic()
        self._make_folder()
        with _signals_interrupt():
            try:
                self.config = self._prepare()
                self._start_all()
                self._watch()
            except Interrupted:
                self.console.print("stopping")
                return 130
            finally:
                self._stop_all()
                self._keep_metrics()
        self._finish(time.monotonic() - started_s)
        return 0

    # --- before ------------------------------------------------------------------------------------------------------

    def _make_folder(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if any(self.out.iterdir()):
                raise SwarmError(f"{self.out} is not empty; choose another folder with --out")
            (self.out / "logs").mkdir()
        except OSError as error:
            raise SwarmError(
                f"cannot write to {self.out}: {error.strerror}; choose another folder with --out"
            ) from error

    def _prepare(self) -> Config:
        """Model and dtype, found by a process of its own; the resolved config is saved with the run."""
        path = self.out / "config.toml"
        path.write_text(config_module.dumps(self.config))
        self.console.print(f"[dim]preparing {self.config.model.name} (the first time takes a minute)[/dim]")
        argv = [sys.executable, "-m", "shoal", "prepare", str(path), "--parent", str(os.getpid())]
        with (self.out / "logs" / "prepare.log").open("wb") as log:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, check=False)
        if done.returncode != 0:
            words = (self.out / "logs" / "prepare.log").read_text(errors="replace").strip().splitlines() or [
                "no reason"
            ]
            raise SwarmError(words[-1].removeprefix("shoal prepare: "))
        found = json.loads(done.stdout.splitlines()[-1])
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
        host, port = (
            self.config.coordinator.host,
            self.config.coordinator.port or _free_port(self.config.coordinator.host),
        )
        run = f"{self.name}-{self.config.run.seed}"
        self.url = f"http://{host}:{port}"
        self._add(
            "coordinator", "coordinator", str(self.out / "config.toml"), "--run", run, "--port", str(port), threads=1
        )
        self._wait_for_coordinator()

        threads = share_threads(self.config, available_cores(self.config.run.threads))

        def add(role: Role, name: str, *more: str, cheat: str = "") -> None:
            expires_s = int(time.time()) + INVITE_S
            invite = make_invite(identity, url=self.url, run=run, role=role, name=name, expires_s=expires_s)
            folder = self.out / name
            folder.mkdir(mode=0o700)
            (folder / "invite").write_text(invite.encode())
            command = ["cheat", cheat] if cheat else [role]
            self._add(name, *command, "--join", str(folder / "invite"), *more, threads=threads.get(role, 1))

        add("learner", "learner")
        add("origin", "origin", "--watch", str(self.out / "learner" / "versions"))
        for i in range(self.config.relays.count):
            add("relay", f"relay-{i}")
        add("validator", "validator")
        for i in range(self.config.workers.count):
            add("worker", f"worker-{i}")
        if self.config.workers.cheat:
            add("worker", "cheater", cheat=self.config.workers.cheat)
        add("evaluator", "evaluator")

    def _add(self, name: str, *command: str, threads: int) -> None:
        module = ["shoal.testing.cheats"] if command[0] == "cheat" else ["shoal"]
        argv = [sys.executable, "-m", *module, *(command[1:] if command[0] == "cheat" else command)]
        argv += ["--dir", str(self.out / name), "--threads", str(threads), "--parent", str(os.getpid())]
        child = Child(name, argv, self.out / "logs" / f"{name}.log")
        self.children.append(child)
        child.start(self._environment(threads))

    def _environment(self, threads: int) -> dict[str, str]:
        counts = {v: str(threads) for v in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        reuse = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}  # fewer page faults
        return os.environ | reuse | counts | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}

    def _wait_for_coordinator(self) -> None:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            child = self.children[0]
            if child.process is not None and child.process.poll() is not None:
                raise SwarmError(f"the coordinator did not start: {child.last_words()}")
            if self._look() is not None:
                return
            time.sleep(0.1)
        raise SwarmError(
            f"the coordinator did not answer at {self.url} within {START_S:.0f} s; see {self.out / 'logs'}"
        )

    # --- watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until the last version is evaluated: show the state, restart what died, keep the metrics."""
        with LiveView(self.console) as view:
            while True:
                status = self._look()
                if status is not None:
                    view.update(status)
                    self._remember(status)
                    if status.state == "finished":
                        return
                for child in self.children:
                    self._revive(child, view)
                stalled_s = time.monotonic() - self.seen.progress_s
                if stalled_s > self.config.run.stall_s:
                    raise SwarmError(f"nothing was accepted or trained for {stalled_s:.0f} s; {self._who_waits()}")
                time.sleep(POLL_S)

    def _look(self) -> Status | None:
        """The coordinator's view of the run; None while it is away (it may be restarting)."""
        try:
            response = httpx.get(f"{self.url}/v1/status", timeout=5)
            return Status.model_validate_json(response.raise_for_status().content)
        except (httpx.HTTPError, ValidationError):
            return None

    def _remember(self, status: Status) -> None:
        seen = self.seen
        if time.monotonic() - seen.weighed_s > WEIGH_S:
            pids = {child.name: child.process.pid for child in self.children if child.process} | {
                "shoal run": os.getpid()
            }
            for name, pid in pids.items():
                peak = _memory_bytes(pid, "status", "VmHWM:")
                seen.rss_bytes[name] = max(seen.rss_bytes.get(name, 0), peak)
            together = sum(_memory_bytes(pid, "smaps_rollup", "Pss:") for pid in pids.values())
            seen.together_bytes, seen.weighed_s = max(seen.together_bytes, together), time.monotonic()
        progress = (len(status.metrics) + len(status.evaluations), sum(node.accepted for node in status.nodes))
        if progress != seen.progress:
            seen.progress, seen.progress_s = progress, time.monotonic()
        new_step = seen.status is None or len(status.metrics) != len(seen.status.metrics)
        seen.status = status
        if new_step:
            self._keep_metrics()

    def _keep_metrics(self) -> None:
        if self.seen.status is not None:
            lines = [json.dumps(metrics) + "\n" for metrics in self.seen.status.metrics]
            (self.out / "metrics.jsonl").write_text("".join(lines))

    def _revive(self, child: Child, view: LiveView) -> None:
        """Start a child that died once more, later each time; give up beyond the limit."""
        if child.ended:
            return
        if child.process is None:
            if time.monotonic() >= child.start_at_s:
                threads = int(child.argv[child.argv.index("--threads") + 1])
                child.start(self._environment(threads))
            return
        code = child.process.poll()
        if code is None:
            return
        if code in (0, EVICTED):
            child.ended = True
            return
        if code == USAGE or child.restarts >= self.config.run.max_restarts:
            raise SwarmError(f"{child.name} ended {child.restarts + 1} times: {child.last_words()} (see {child.log})")
        backoff_s = min(0.5 * 2**child.restarts, LONGEST_BACKOFF_S)
        child.restarts += 1
        child.process, child.start_at_s = None, time.monotonic() + backoff_s
        how = f"by signal {-code}" if code < 0 else f"with status {code}: {child.last_words()}"
        view.log(f"{child.name} ended {how}; restart {child.restarts} in {backoff_s:g} s")

    def _who_waits(self) -> str:
        nodes = self.seen.status.nodes if self.seen.status else []
        waiting = [f"{node.name} is {node.stats.doing}" for node in nodes if node.stats.doing.startswith("waiting")]
        return "; ".join(waiting) or f"see {self.out / 'logs'}"

    # --- ending ------------------------------------------------------------------------------------------------------

    def _stop_all(self) -> None:
        running = [child.process for child in self.children if child.process and child.process.poll() is None]
        for process in running:
            process.terminate()
        deadline_s = time.monotonic() + STOP_S
        for process in running:
            try:
                process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _finish(self, wall_s: float) -> None:
        """The trained model, the report and the table."""
        versions = sorted((self.out / "learner" / "versions").glob("v*"))
        shutil.copytree(versions[-1], self.out / "model")
        status = self.seen.status
        if status is None:
            raise SwarmError(f"the coordinator was never heard of; see {self.out / 'logs'}")
        summary = write_report(
            self.out,
            config=self.config,
            status=status,
            seed=self.config.run.seed,
            wall_s=wall_s,
            restarts={child.name: child.restarts for child in self.children},
            peak_rss_bytes=self.seen.rss_bytes,
            peak_together_bytes=self.seen.together_bytes,
        )
        self.console.print(summary_table(summary, self.out))


def available_cores(wanted: int) -> int:
    """Cores to share out: `wanted`, or all that this process may use."""
    return wanted or len(os.sched_getaffinity(0))


def share_threads(config: Config, cores: int) -> dict[str, int]:
    """Threads for each role that computes: at least one each, and no more together than there are cores, where it goes.

    With async level 0 learning and generating take turns, so each phase gets all cores.
    """
    if config.coordinator.async_level == 0:
        return {"learner": cores, "validator": 1, "worker": max(1, cores // config.workers.count), "evaluator": 1}
    learner = max(1, cores // 2)
    each_worker = max(1, (cores - learner) // (config.workers.count + 1))
    return {"learner": learner, "validator": each_worker, "worker": each_worker, "evaluator": 1}


def _memory_bytes(pid: int, file: str, key: str) -> int:
    """A figure of Linux's /proc: peak resident (status, VmHWM), or held now with shared pages split (smaps_rollup, Pss)."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:  # it has just ended, or this system has no such file: unknown counts as none
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    def interrupt(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not break the clean-up
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Interrupted

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""`shoal pool meet` and sites of `shoal pretrain` as real processes, for the slow tests."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

LIMIT_S = 600.0  # for any wait: several processes import PyTorch on a busy machine


class Run:
    def __init__(self, folder: Path, config: Path, trains: str) -> None:
        """`trains`: the subcommand of `shoal` that a site runs."""
        self.folder, self.config, self.trains = folder, config, trains
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *overrides: str, out: Path | None = None, ranks: int = 1) -> None:
        """Start the meeting or a site; under torchrun if `ranks` is above 1."""
        command = [sys.executable, "-m"]
        if ranks > 1:
            command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        command += ["shoal"]
        if name == "meet":
            command += ["pool", "meet", str(self.config), "--dir", str(self.folder / "meet")]
        else:
            self.until(self.invite(name).exists, "the invite")
            command += [self.trains, str(self.config), "--join", str(self.invite(name))]
            command += ["--out", str(out or self.folder / name)]
        command += ["--threads", "1", *(word for each in overrides for word in ("--set", each))]
        with (self.folder / f"{name}.log").open("ab") as log:
            environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def invite(self, name: str) -> Path:
        return self.folder / "meet" / "invites" / f"{name}.invite"

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait()

    def kill_rank(self, name: str, rank: int) -> None:
        """Kill one process of a site under torchrun, which then ends the others."""
        children = psutil.Process(self.processes[name].pid).children(recursive=True)
        next(each for each in children if each.environ().get("RANK") == str(rank)).kill()

    def rounds(self) -> list[dict[str, Any]]:
        path = self.folder / "meet" / "rounds.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"waited in vain for {what}: {self.log('meet')[-2000:]}"
            time.sleep(0.1)

    def until_round(self, condition: Callable[[dict[str, Any]], bool], what: str, since: int = 0) -> None:
        """Wait for a round, from `since` on, that meets the condition."""
        self.until(lambda: any(condition(each) for each in self.rounds()[since:]), f"a round {what}")

    def until_together(self, *names: str) -> None:
        """Wait for another round in which the offers of all these sites count."""
        since = len(self.rounds())
        self.until_round(lambda each: set(names) <= set(each["kept"]), f"of {', '.join(names)}", since)

    def without(self, name: str, number: int) -> None:
        """Send a site this signal, and wait for a round in which it is missing."""
        since = len(self.rounds())
        self.signal(name, number)
        self.until_round(lambda each: name in each["missing"], f"without {name}", since)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def end(self, name: str) -> int:
        return self.processes[name].wait(LIMIT_S)

    def figures(self, name: str) -> list[dict[str, Any]]:
        """Return the complete lines of a site's metrics; a killed site may have written part of one."""
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def model(self, name: str) -> bytes:
        return (self.folder / name / "model" / "model.safetensors").read_bytes()

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                for each in psutil.Process(process.pid).children(recursive=True):
                    each.kill()
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()

"""Real processes: `shoal meet` and sites that are killed, stopped and started again; and what a wrong site is told."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
LIMIT_S = 600.0  # of any wait: several processes import PyTorch on a busy machine
WAIT_S = 4.0


class Run:
    def __init__(self, folder: Path, config: Path) -> None:
        self.folder, self.config = folder, config
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *overrides: str) -> None:
        command = [sys.executable, "-m", "shoal"]
        if name == "meet":
            command += ["meet", str(self.config), "--dir", str(self.folder / "meet")]
        else:
            invite = self.folder / "meet" / "invites" / f"{name}.invite"
            self.until(invite.exists, "the invite")
            command += ["pretrain", str(self.config), "--out", str(self.folder / name), "--join", str(invite)]
        command += ["--threads", "1", *(word for each in overrides for word in ("--set", each))]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait()

    def rounds(self) -> list[dict[str, Any]]:
        path = self.folder / "meet" / "rounds.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return list({each["round"]: each for each in map(json.loads, lines)}.values())

    def until(self, true: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline_s, f"waited for {what}: {self.log('meet')[-2000:]}"
            time.sleep(0.1)

    def until_round(self, count: int) -> None:
        self.until(lambda: len(self.rounds()) >= count, f"round {count}")

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def end(self, name: str) -> int:
        return self.processes[name].wait(LIMIT_S)

    def figures(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path, tiny_folder: Path) -> Iterator[Run]:
    data, config = tmp_path / "text.jsonl", tmp_path / "small.toml"
    data.write_text("".join(json.dumps({"text": f"{i} + {i} = {2 * i}. " * 5}) + "\n" for i in range(3000)))
    config.write_text(
        f"[model]\nname = {json.dumps(str(tiny_folder))}\ndtype = 'float32'\n[pretrain]\ndata = {json.dumps(str(data))}\n"
        "steps = 300\nbatch = 2\ntokens = 32\nlr = 1e-3\nwarmup_steps = 5\nheldout = 8\neval_every = 100\n"
        f"checkpoint_every = 10\nshare = 5\n[sites]\nsites = 3\ninner_steps = 10\nwait_s = {WAIT_S}\n"
        "momentum = 0.5\ngive_up_s = 300\n"
    )
    found = Run(tmp_path, config)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    yield found
    for process in found.processes.values():
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def test_sites_and_meeting_are_killed_and_stopped_and_all_end_with_the_same_bits(run: Run) -> None:
    sites = ["site-0", "site-1", "site-2"]
    for name in ("meet", *sites):
        run.start(name)
    run.until_round(2)
    run.signal("site-2", signal.SIGKILL)
    run.until_round(4)
    run.start("site-2")
    run.signal("site-1", signal.SIGSTOP)
    time.sleep(2 * WAIT_S)
    run.signal("site-1", signal.SIGCONT)
    run.until_round(len(run.rounds()) + 1)
    run.signal("meet", signal.SIGKILL)
    before = len(run.rounds())
    run.start("meet")
    run.until_round(before + 2)
    for name in ("site-0", "site-1"):  # more than half of them
        run.signal(name, signal.SIGKILL)
    run.until(lambda: run.rounds()[-1]["kept"] == ["site-2"], "a round of site-2 alone")
    run.signal("site-2", signal.SIGSTOP)  # or it would be done before the others are back
    for name in ("site-0", "site-1"):
        run.start(name)
        run.until(lambda name=name: f"{name} is back" in run.log("meet"), f"{name} to be back")
    run.signal("site-2", signal.SIGCONT)
    assert [run.end(name) for name in (*sites, "meet")] == [0, 0, 0, 0], [run.log(name)[-800:] for name in sites]
    rounds = run.rounds()
    assert [each["round"] for each in rounds] == list(range(30))  # none is lost
    missing = {name for each in rounds for name in each["missing"]}
    assert {"site-1", "site-2"} <= missing | {name for each in rounds for name in each["healed"]}
    agreed = {each["round"]: each["digest"] for each in rounds}
    for name in sites:
        landed = [each for each in run.figures(name) if "digests" in each and each["quorum"]]
        assert landed
        assert all(each["digests"] == [agreed[each["round"] - 1]] for each in landed)
        assert landed[-1]["round"] == 30
    models = {(run.folder / name / "model" / "model.safetensors").read_bytes() for name in sites}
    assert len(models) == 1
    held = [each["heldout_loss"] for each in run.figures("site-2") if "heldout_loss" in each]
    assert held[-1] < held[0]


def test_a_site_that_differs_is_told_what_and_the_others_go_on(run: Run) -> None:
    run.config.write_text(run.config.read_text().replace("steps = 300", "steps = 20"))
    run.start("meet", "sites.sites=2")
    invite = run.folder / "meet" / "invites" / "site-1.invite"
    run.until(invite.exists, "the invite")
    for override, words in (
        ("pretrain.lr=2e-3", "has another pretrain.lr: 0.002, and the run has 0.001; give every site the same"),
        ("pretrain.field=url", "it has no text in the field 'url'"),
        ("sites.kind=int8", "has another sites.kind: int8"),
    ):
        command = [sys.executable, "-m", "shoal", "pretrain", str(run.config), "--out", str(run.folder / override)]
        done = subprocess.run([*command, "--join", str(invite), "--set", override], capture_output=True, text=True)
        assert done.returncode == 1
        assert words in done.stderr.splitlines()[-1]
    run.start("site-0")
    assert [run.end(name) for name in ("site-0", "meet")] == [0, 0]

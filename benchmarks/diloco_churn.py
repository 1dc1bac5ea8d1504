"""Sites and their meeting under random faults: real processes, real text; and whether anything was lost or differs.

    python benchmarks/diloco_churn.py --minutes 20 --out benchmarks/results/diloco_churn.json

Every few seconds one of: kill -9 of a site, of the meeting, or of half of the sites; SIGSTOP of a site for up to twenty
seconds. What was killed is started again after some seconds. Then all are left alone until a round has every site. `wrong`
must be empty: a round that is missing or out of order, a site whose digest after a round is not the meeting's.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from machine import describe

WAIT_S = 6.0
KINDS = ("kill a site", "kill a site", "stop a site", "kill the meeting", "kill half of the sites")
CONFIG = """[model]
name = "bundled:tiny"
dtype = "float32"
[pretrain]
data = "{folder}/text.jsonl"
steps = 1000000
batch = 2
tokens = 64
lr = 1e-3
final_lr = 1e-3
warmup_steps = 20
heldout = 2
share = 2
eval_every = 100
checkpoint_every = 20
[sites]
sites = {sites}
inner_steps = 10
wait_s = {wait_s}
momentum = 0.0
lr = 1.0
give_up_s = 300
"""


class Run:
    def __init__(self, folder: Path, sites: int) -> None:
        self.folder, self.sites = folder, [f"site-{i}" for i in range(sites)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        lines = [json.dumps({"text": path.read_text(errors="replace")}) + "\n" for path in files]
        (folder / "text.jsonl").write_text("".join(lines))
        (folder / "churn.toml").write_text(CONFIG.format(folder=folder, sites=sites, wait_s=WAIT_S))

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "shoal"]
        if name == "meet":
            command += ["meet", str(self.folder / "churn.toml"), "--dir", str(self.folder / "meet")]
        else:
            invite = self.folder / "meet" / "invites" / f"{name}.invite"
            wait(invite.exists, 120, "the meeting's invites")
            command += ["pretrain", str(self.folder / "churn.toml"), "--join", str(invite)]
            command += ["--out", str(self.folder / name)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen([*command, "--threads", "1"], stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def rounds(self) -> list[dict[str, Any]]:
        """Of each round its last record: a meeting that was killed while it wrote one writes it again."""
        path = self.folder / "meet" / "rounds.jsonl"
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        return list({each["round"]: each for each in map(json.loads, lines)}.values())

    def figures(self, name: str) -> list[dict[str, Any]]:
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]


def wait(true: Any, within_s: float, what: str) -> None:
    deadline_s = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"waited {within_s:.0f} s for {what}")
        time.sleep(0.1)


def fault(run: Run, draw: random.Random) -> str:
    kind, site = draw.choice(KINDS), draw.choice(run.sites)
    if kind == "stop a site":
        run.processes[site].send_signal(signal.SIGSTOP)
        time.sleep(draw.uniform(1, 20))
        run.processes[site].send_signal(signal.SIGCONT)
        return kind
    names = {"kill a site": [site], "kill the meeting": ["meet"]}.get(kind) or draw.sample(
        run.sites, (len(run.sites) + 1) // 2
    )
    for name in names:
        run.kill(name)
    time.sleep(draw.uniform(0, 10))
    for name in names:
        run.start(name)
    return kind


def verdict(run: Run) -> dict[str, Any]:
    rounds = run.rounds()
    agreed = {each["round"]: each["digest"] for each in rounds}
    wrong = []
    if list(agreed) != list(range(len(rounds))):
        wrong.append("a round is missing or out of order")
    compared = 0
    for name in run.sites:
        for each in run.figures(name):
            if "digests" in each and each["quorum"]:
                compared += 1
                if each["digests"] != [agreed[each["round"] - 1]]:
                    wrong.append(f"{name} differs after round {each['round'] - 1}")
    losses = [each["heldout_loss"] for each in run.figures("site-0") if "heldout_loss" in each]
    return {
        "wrong": wrong,
        "rounds": len(rounds),
        "rounds_with_all_sites": sum(len(each["kept"]) == len(run.sites) for each in rounds),
        "longest_round_s": max(each["open_s"] for each in rounds),
        "healed": sum(len(each["healed"]) for each in rounds),
        "missing": sum(len(each["missing"]) for each in rounds),
        "left_out": sum(len(each["left_out"]) for each in rounds),
        "digests_compared": compared,
        "unfinished_shares": rounds[-1]["unfinished_shares"],
        "heldout_loss": [losses[0], losses[-1]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--every", type=float, default=15.0, help="mean seconds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    held = {"command": f"python benchmarks/diloco_churn.py {' '.join(sys.argv[1:])}", "machine": describe()}
    draw, faults = random.Random(arguments.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), arguments.sites)
        try:
            for name in ("meet", *run.sites):
                run.start(name)
            wait(lambda: len(run.rounds()) >= 2, 300, "two rounds")
            end_s = time.monotonic() + 60 * arguments.minutes
            while time.monotonic() < end_s:
                time.sleep(draw.expovariate(1 / arguments.every))
                faults[fault(run, draw)] += 1
            before = len(run.rounds())
            wait(
                lambda: any(len(each["kept"]) == arguments.sites for each in run.rounds()[before:]),
                300,
                "a whole round",
            )
            found = {"faults": dict(faults), "load": os.getloadavg()} | verdict(run)
        finally:
            for process in run.processes.values():
                process.kill()
                process.wait()
    arguments.out.write_text(json.dumps(held | found, indent=1) + "\n")
    print(json.dumps(found))  # noqa: T201
    sys.exit(bool(found["wrong"]))


if __name__ == "__main__":
    main()

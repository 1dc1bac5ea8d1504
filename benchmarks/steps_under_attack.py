"""What abuse of the coordinator costs a whole run: seconds a step, in quiet and under each attack of `abuse.py`, in turns.

    python benchmarks/steps_under_attack.py [--seconds 20] [--only garbage]

A run of configs/tiny.toml shares this machine's cores with the attackers. Each attack runs in its own process for --seconds,
after --seconds of quiet. A phase's figure is its length divided by the number of steps that ended in it. The results also
hold the attackers' CPU time, because real attackers compute on machines of their own.

Writes benchmarks/results/steps_under_attack.json.
"""

import argparse
import asyncio
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from abuse import CONFIG, Site, attack_in_a_process, attacks, join
from machine import describe

from shoal.coordinator.service import invite_from
from shoal.protocol.identity import Identity

RESULTS = Path(__file__).parent / "results" / "steps_under_attack.json"
START_S = 240.0
WARM_STEPS = 5


def times(metrics: Path) -> list[float]:
    """When each step ended, Unix seconds."""
    if not metrics.exists():
        return []
    return [json.loads(line)["time_s"] for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]


def attackers_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as made:
        out = Path(made) / "run"
        command = [sys.executable, "-m", "shoal", "run", str(CONFIG), "--out", str(out), "--set", "run.steps=100000"]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline_s = time.monotonic() + START_S
            while len(times(out / "metrics.jsonl")) < WARM_STEPS:
                if run.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"the run made no {WARM_STEPS} steps in {START_S:g} s: see {out}/logs")
                await asyncio.sleep(0.2)
            folder = out / "coordinator"
            invite = await asyncio.to_thread(invite_from, folder, "worker", "insider", None, 1.0)
            site = Site.at(invite, Identity.generate())
            site.invite = await join(site, folder, site.insider, "attacker")
            phases: list[dict[str, Any]] = []
            for name in [name for name in attacks(site, 0) if arguments.only in name]:
                for attack in ("", name):
                    phases.append(await phase(site, out / "metrics.jsonl", arguments.seconds, attack))
                    sys.stdout.write(f"{json.dumps(phases[-1])}\n")
                    sys.stdout.flush()
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(120)
    quiet = [found["step_s"] for found in phases if not found["attack"]]
    attacked = [found["step_s"] for found in phases if found["attack"]]
    ratio = statistics.median(b / a for a, b in zip(quiet, attacked, strict=True))
    told = {"command": " ".join(["python", *sys.argv]), "machine": describe() | {"load": os.getloadavg()}}
    RESULTS.write_text(json.dumps(told | {"ratio": ratio, "phases": phases}, indent=1) + "\n")
    sys.stdout.write(f"a step takes {ratio:.2f} times as long under attack (median of the pairs)\n")


async def phase(site: Site, metrics: Path, seconds: float, attack: str) -> dict[str, Any]:
    began_s, cpu_s = time.time(), attackers_cpu_s()
    ended = await attack_in_a_process(site, seconds, attack) if attack else {}
    await asyncio.sleep(max(0.0, began_s + seconds - time.time()))
    took_s = time.time() - began_s
    steps = sum(began_s <= ended_s < began_s + took_s for ended_s in times(metrics))
    return {
        "attack": attack,
        "seconds": round(took_s, 2),
        "steps": steps,
        "step_s": round(took_s / max(steps, 1), 3),
        "attackers_cpu": round((attackers_cpu_s() - cpu_s) / took_s, 3),
        "attack_ended": ended,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What abuse of the coordinator costs a whole run.")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    asyncio.run(main(parser.parse_args()))

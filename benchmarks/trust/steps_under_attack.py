"""Measure how abuse of the coordinator slows a whole run: seconds per step, without and under each attack of `abuse.py`.

    python -m benchmarks.trust.steps_under_attack [--seconds 20] [--only garbage]

Unlike real attackers, the attackers here share the cores of one machine with the run (configs/tiny.toml). So each attack
has three phases of --seconds: without any attack, with the attack in another process, and with a process that uses as much
CPU time as the attackers but sends nothing. A phase's figure is its length divided by the number of steps that ended in it.
The cost of the attacks is the median ratio of the second to the third phase. The ratio to the first phase also counts the
attackers' own CPU time.

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

from benchmarks.common.machine import RESULTS, about, save
from benchmarks.common.process import SHOAL, wait_until
from benchmarks.trust.abuse import CONFIG, Site, attack_in_a_process, attacks, join
from shoal.coordinator.folder import create_invite
from shoal.protocol.identity import Identity

PATH = RESULTS / "steps_under_attack.json"
WARM_STEPS = 5

CPU_ALONE = "CPU alone"
BURN = """
import sys, time
share, seconds = map(float, sys.argv[1:])
began_s = time.time()
while time.time() < began_s + seconds:
    if time.process_time() < share * (time.time() - began_s):
        sum(range(10_000))
    else:
        time.sleep(0.002)
"""  # uses the given share of a core


def times(metrics: Path) -> list[float]:
    """Return when each step ended, in Unix seconds."""
    if not metrics.exists():
        return []
    return [json.loads(line)["time_s"] for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]


def attackers_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as made:
        out = Path(made) / "run"
        command = [*SHOAL, "run", str(CONFIG), "--out", str(out), "--set", "run.steps=100000"]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            metrics = out / "metrics.jsonl"
            wait_until(lambda: len(times(metrics)) >= WARM_STEPS, f"step {WARM_STEPS}", process=run)
            folder = out / "coordinator"
            invite = await asyncio.to_thread(create_invite, folder, "worker", "insider", None, 1.0)
            site = Site.at(invite, Identity.generate())
            site.invite = await join(site, folder, site.insider, "attacker")
            phases: list[dict[str, Any]] = []
            for name in [name for name in attacks(site, 0) if arguments.only in name]:
                for attack in ("", name, CPU_ALONE):
                    share = phases[-1]["attackers_cpu"] if attack == CPU_ALONE else 0.0
                    phases.append(await phase(site, metrics, arguments.seconds, attack, share))
                    sys.stdout.write(f"{json.dumps(phases[-1])}\n")
                    sys.stdout.flush()
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(120)
    steps_s = [figures["step_s"] for figures in phases]
    quiet, attacked, alone = steps_s[::3], steps_s[1::3], steps_s[2::3]
    ratio = statistics.median(a / b for a, b in zip(attacked, alone, strict=True))
    against_quiet = statistics.median(a / b for a, b in zip(attacked, quiet, strict=True))
    result: dict[str, Any] = about() | {"load": os.getloadavg()}
    result |= {"ratio": ratio, "against_quiet": against_quiet, "phases": phases}
    save(PATH, result)
    sys.stdout.write(f"a step takes {ratio:.2f} times as long; with the attackers' CPU time, {against_quiet:.2f}\n")


async def phase(site: Site, metrics: Path, seconds: float, attack: str, share: float) -> dict[str, Any]:
    began_s, cpu_s = time.time(), attackers_cpu_s()
    ended: dict[str, int] = {}
    if attack == CPU_ALONE:
        await asyncio.to_thread(subprocess.run, [sys.executable, "-c", BURN, str(share), str(seconds)], check=True)
    elif attack:
        ended = await attack_in_a_process(site, seconds, attack)
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
    parser = argparse.ArgumentParser(description="Measure how abuse of the coordinator slows a whole run.")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each phase")
    parser.add_argument("--only", default="", help="run only attacks whose name contains this")
    asyncio.run(main(parser.parse_args()))

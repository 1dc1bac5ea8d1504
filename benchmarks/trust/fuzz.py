"""Feed a million damaged inputs to code that reads bytes from strangers: proofs, submissions, coordinator requests.

    python -m benchmarks.trust.fuzz [--proofs 900000] [--files 100000] [--requests 20000] [--seed 0]

Fails if any outcome is not a documented refusal, if a case takes longer than DEADLINE_S, or if a part's memory grows by more
than GROWTH_BYTES after its first tenth. Writes benchmarks/results/fuzz.json. A part's seed is a hash of `--seed` and its
name, so a part run alone has the same cases, except for keys, nonces and the clock.
"""

import argparse
import faulthandler
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from tests.fuzzing.coordinator import fuzz_requests
from tests.fuzzing.damage import CRASH, Note
from tests.fuzzing.files import fuzz_files
from tests.fuzzing.proofs import fuzz_proofs

from benchmarks.common.machine import RESULTS, about, save

DEADLINE_S = 60.0  # if no case ends for this long, the stack is printed and the process ends
GROWTH_BYTES = 64 << 20
MAX_REPORTED = 100  # crashes printed in full; all are counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proofs", type=int, default=900_000)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    memory = Path("/dev/shm")  # every request syncs a database; memory keeps the disk out of the measurement
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        parts: dict[str, tuple[int, Callable[[Random, int, Note], None]]] = {
            "proofs": (arguments.proofs, fuzz_proofs),
            "files": (arguments.files, fuzz_files),
            "requests": (
                arguments.requests,
                lambda random, cases, note: fuzz_requests(random, cases, note, Path(folder)),
            ),
        }
        result: dict[str, Any] = about()
        result["parts"] = {
            name: run(name, Random(f"{arguments.seed} {name}"), *part) for name, part in parts.items() if part[0]
        }
    result["cases"] = sum(part["cases"] for part in result["parts"].values())
    result["failed"] = sum(part["crashes"] + part["grew"] for part in result["parts"].values())
    path = RESULTS / "fuzz.json"
    save(path, result)
    sys.exit(1 if result["failed"] else 0)


def run(name: str, random: Random, cases: int, part: Callable[[Random, int, Note], None]) -> dict[str, Any]:
    """Run the cases of one part. Return outcomes, speed, and this process's memory after a tenth of the cases and after
    all."""
    outcomes: Counter[str] = Counter()
    crashes: list[str] = []
    watched_s = warm_bytes = done = 0.0
    slowest_s, last_s = 0.0, time.perf_counter()

    def note(outcome: str) -> None:
        nonlocal watched_s, warm_bytes, done, slowest_s, last_s
        now_s = time.perf_counter()
        slowest_s, last_s = max(slowest_s, now_s - last_s), now_s
        if outcome.startswith(CRASH):
            crashes.append(outcome)
            outcome = CRASH
        outcomes[outcome] += 1
        done += 1
        if done == max(cases // 10, 1):
            warm_bytes = rss_bytes()
        if now_s - watched_s > 1:
            watched_s = now_s
            faulthandler.dump_traceback_later(DEADLINE_S, exit=True)

    started_s = time.perf_counter()
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    part(random, cases, note)
    faulthandler.cancel_dump_traceback_later()
    seconds, end_bytes = time.perf_counter() - started_s, rss_bytes()
    measured = {
        "cases": int(done),
        "crashes": len(crashes),
        "readers_ended": sum(n for outcome, n in outcomes.items() if outcome.startswith("file that")),
        "outcomes": dict(outcomes.most_common()),
        "seconds": round(seconds, 1),
        "cases_per_s": round(done / seconds, 1),
        "slowest_s": round(slowest_s, 3),
        "rss_bytes_after_a_tenth": int(warm_bytes),
        "rss_bytes_at_the_end": end_bytes,
        "grew": end_bytes > warm_bytes + GROWTH_BYTES,
        "first_crashes": crashes[:MAX_REPORTED],
    }
    grown_mib = (end_bytes - warm_bytes) / 2**20
    sys.stdout.write(
        f"{name}: {int(done)} cases in {seconds:.0f} s, {len(crashes)} crashes, "
        f"{measured['readers_ended']} files ended a reader, "
        f"slowest {slowest_s:.2f} s, memory {grown_mib:+.0f} MiB\n"
    )
    for crash in crashes[:5]:
        sys.stdout.write(f"  {crash[:400]}\n")
    sys.stdout.flush()
    return measured


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()

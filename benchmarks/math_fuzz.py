"""Fuzzed answers for the math reward: every one is graded within its limit of CPU time.

    python benchmarks/math_fuzz.py [--answers 10000] [--seed 0]

Fails if a comparison takes more than its limit and a tenth. Writes benchmarks/results/math_fuzz.json: counts by outcome, the
slowest, and why graders failed. An answer that burns its limit is ended there and counted as a grader error.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import describe

from shoal.tasks.rewards.killable import Killable, Result
from shoal.tasks.rewards.math import CPU_S, EQUALITY, MEMORY_BYTES, Math
from shoal.tasks.task import Grade, Task

sys.path.insert(0, str(Path(__file__).parents[1]))  # the fuzzers are test code
from tests.fuzzing.answers import answers  # noqa: E402

HERE = Path(__file__).parent
SLACK_S = 0.1 * CPU_S


class Watched(Killable):
    """Remembers how each comparison ended."""

    results: list[Result] = []

    def run(self, values: Sequence[Any]) -> list[Result]:
        found = super().run(values)
        self.results.extend(found)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    reward = Math()
    reward.pool = pool = Watched(EQUALITY, "judge", cpu_s=CPU_S, memory_bytes=MEMORY_BYTES)
    pool.start()
    grades: list[Grade] = []
    slowest: list[tuple[float, str, str]] = []
    start_s = time.perf_counter()
    for gold, completion in answers(arguments.seed, arguments.answers):
        began_s, compared = time.perf_counter(), len(pool.results)
        grades += reward.grade([Task("fuzz", "", gold)], [completion])
        own_s = time.perf_counter() - began_s if len(pool.results) == compared else pool.results[-1].cpu_s
        slowest = sorted([*slowest, (own_s, gold, completion)], reverse=True)[:10]
        if len(grades) % 500 == 0:
            print(f"{len(grades)} of {arguments.answers}, slowest {slowest[0][0]:.3f} s", file=sys.stderr)  # noqa: T201
    elapsed_s = time.perf_counter() - start_s
    reward.close()
    cpu_s = sorted(result.cpu_s for result in pool.results)
    report = {
        "command": f"python benchmarks/math_fuzz.py --answers {arguments.answers} --seed {arguments.seed}",
        "machine": describe(),
        "limit_cpu_s": CPU_S,
        "answers": len(grades),
        "over_the_limit": sum(one > CPU_S + SLACK_S for one in [*cpu_s, slowest[0][0]]),
        "outcomes": Counter(grade.outcome for grade in grades),
        "scored_1": sum(grade.score for grade in grades),
        "not_repeatable": sum(not grade.repeatable for grade in grades),
        "comparisons": len(cpu_s),
        "endings": Counter(result.ending for result in pool.results),
        "errors": Counter(result.detail[:60] for result in pool.results if result.ending == "raised").most_common(20),
        "cpu_s": {"median": cpu_s[len(cpu_s) // 2], "p99": cpu_s[len(cpu_s) * 99 // 100], "most": cpu_s[-1]},
        "memory_mib_most": max(result.memory_bytes for result in pool.results) >> 20,
        "seconds": round(elapsed_s, 1),
        "slowest": [{"s": round(s, 4), "gold": gold, "completion": text[:100]} for s, gold, text in slowest],
    }
    (HERE / "results" / "math_fuzz.json").write_text(json.dumps(report, indent=1) + "\n")
    if report["over_the_limit"] or len(grades) != arguments.answers:
        sys.exit(f"{report['over_the_limit']} answers over the limit")


if __name__ == "__main__":
    main()

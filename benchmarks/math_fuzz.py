"""Fuzzed answers for the math reward: every one is graded within its limit of CPU time.

    python benchmarks/math_fuzz.py [--answers 10000] [--seed 0] [--size 1]

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

from shoal.sandbox import CallResult
from shoal.tasks.rewards.math import CPU_S, Math, final_answer
from shoal.tasks.task import Grade, Task

sys.path.insert(0, str(Path(__file__).parents[1]))  # the fuzzers are test code
from tests.fuzzing.answers import answers  # noqa: E402

BATCH = 100
HERE = Path(__file__).parent
SLACK_S = 0.1 * CPU_S


def watch(reward: Math, ended: list[tuple[Any, CallResult]]) -> None:
    """Remember how each comparison ended."""
    calls = reward.grader.calls

    def watched(values: Sequence[Any]) -> list[CallResult]:
        found = calls(values)
        ended.extend(zip(values, found, strict=True))
        return found

    reward.grader.calls = watched  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=1, help="processes that compare")
    arguments = parser.parse_args()
    reward, ended = Math(size=arguments.size), list[tuple[Any, CallResult]]()
    watch(reward, ended)
    reward.grade([Task("warm", "", "1/2")], ["0.5"])
    ended.clear()
    cases = list(answers(arguments.seed, arguments.answers))
    machine = describe()
    start_s = time.perf_counter()
    reading_s = max(read_s(completion) for _, completion in cases)
    grades: list[Grade] = []
    for at in range(0, len(cases), BATCH):
        golds, completions = zip(*cases[at : at + BATCH], strict=True)
        grades += reward.grade([Task("fuzz", "", gold) for gold in golds], completions)
        print(f"{len(grades)} of {len(cases)}", file=sys.stderr)  # noqa: T201
    elapsed_s = time.perf_counter() - start_s
    reward.close()
    slowest = sorted(ended, key=lambda one: -one[1].cpu_s)
    cpu_s = [result.cpu_s for _, result in slowest]
    report = {
        "command": f"python benchmarks/math_fuzz.py --answers {len(cases)} --seed {arguments.seed} --size {arguments.size}",
        "machine": machine,
        "limit_cpu_s": CPU_S,
        "answers": len(grades),
        "over_the_limit": sum(one > CPU_S + SLACK_S for one in [*cpu_s, reading_s]),
        "outcomes": Counter(grade.outcome for grade in grades),
        "scored_1": sum(grade.score for grade in grades),
        "not_repeatable": sum(not grade.repeatable for grade in grades),
        "comparisons": len(cpu_s),
        "endings": Counter(result.ending for _, result in slowest),
        "errors": Counter(result.detail[:60] for _, result in slowest if result.ending == "raised").most_common(20),
        "cpu_s": {"median": cpu_s[len(cpu_s) // 2], "p99": cpu_s[len(cpu_s) // 100], "most": cpu_s[0]},
        "final_answer_cpu_s_most": round(reading_s, 6),
        "memory_mib_most": max(result.memory_bytes for _, result in slowest) >> 20,
        "seconds": round(elapsed_s, 1),
        "slowest": [
            {"cpu_s": result.cpu_s, "ending": result.ending, "gold": value[0], "answer": value[1][:100]}
            for value, result in slowest[:10]
        ],
    }
    (HERE / "results" / "math_fuzz.json").write_text(json.dumps(report, indent=1) + "\n")
    if report["over_the_limit"] or len(grades) != arguments.answers:
        sys.exit(f"{report['over_the_limit']} answers over the limit")


def read_s(completion: str) -> float:
    start_s = time.process_time()
    final_answer(completion)
    return time.process_time() - start_s


if __name__ == "__main__":
    main()

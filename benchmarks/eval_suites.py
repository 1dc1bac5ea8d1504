"""Real figures of `shoal eval` on a small model: GSM8K and HumanEval, greedy, one completion a task.

    python benchmarks/eval_suites.py --gsm8k gsm8k_test.jsonl --humaneval HumanEval.jsonl.gz

Writes benchmarks/results/eval-gsm8k.json and eval-humaneval.json: results.json of each, with command, machine and seconds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe

RESULTS = Path(__file__).parent / "results"
MODEL = "bundled:smollm2-135m-instruct"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, help="test split as JSON lines")
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl.gz")
    arguments = parser.parse_args()
    if arguments.gsm8k:
        measure("GSM8K", arguments.gsm8k, n=50, max_tokens=256)
    if arguments.humaneval:
        measure("HumanEval", arguments.humaneval, n=20, max_tokens=256)


def measure(suite: str, path: Path, n: int, max_tokens: int) -> None:
    with tempfile.TemporaryDirectory() as out:
        settings = ["--n", str(n), "--max-tokens", str(max_tokens), "--path", str(path), "--out", out]
        began_s = time.perf_counter()
        subprocess.run([sys.executable, "-m", "shoal", "eval", suite, "--model", MODEL, *settings], check=True)
        seconds = time.perf_counter() - began_s
        found = json.loads((Path(out) / "results.json").read_text())
    found["command"] = f"shoal eval {suite} --model {MODEL} --n {n} --max-tokens {max_tokens} --path {path.name}"
    for facts in found["config"]["suites"].values():
        facts["source"] = path.name
    target = RESULTS / f"eval-{suite.lower()}.json"
    target.write_text(json.dumps({**found, "seconds": round(seconds, 1), "machine": describe()}, indent=2) + "\n")


if __name__ == "__main__":
    main()

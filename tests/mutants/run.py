"""Apply each fault of `faults` to a copy of the source and run the tests that should catch it. Exit with 1 if any survives.

    make mutants ARGS="--only toploc --out survivors.json"

PyTorch, transformers and pytest are imported once, and each fault runs in a forked process. Invariants: the checkout is not
changed, and a process that does not import Shoal from its copy counts as an error.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers  # noqa: F401  for the forked processes

from .faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
ELSEWHERE, CAUGHT, SURVIVED = 99, 1, 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run only faults whose name contains this")
    parser.add_argument("--out", type=Path, help="JSON file for the results; faults that it already has are skipped")
    args = parser.parse_args()
    outcomes = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    chosen = [fault for fault in FAULTS if args.only in fault.name and fault.name not in outcomes]
    for number, fault in enumerate(chosen):
        started_s = time.monotonic()
        outcomes[fault.name] = outcome = run(fault) if pass_without_fault(fault.tests, fault.only) else "tests fail"
        sys.stdout.write(
            f"{number + 1}/{len(chosen)} {outcome:9} {time.monotonic() - started_s:5.1f} s  {fault.name}\n"
        )
        sys.stdout.flush()
        if args.out:
            args.out.write_text(json.dumps(outcomes, indent=1) + "\n")
    survivors = [name for name, outcome in outcomes.items() if outcome != "caught"]
    sys.stdout.write(
        f"{len(outcomes)} faults, {len(survivors)} not caught\n" + "".join(f"  {name}\n" for name in survivors)
    )
    return int(bool(survivors))


@cache
def pass_without_fault(tests: str, only: str) -> bool:
    return run(Fault("__init__.py", "", "", tests, only)) == "survived"


def run(fault: Fault) -> str:
    """Return "caught", "survived", or an error."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        changed = copy / "shoal" / fault.file
        text = changed.read_text()
        if fault.old and text.count(fault.old) != 1:
            return "stale"
        changed.write_text(text.replace(fault.old, fault.new) if fault.old else text)
        child = os.fork()
        if child == 0:
            os._exit(exit_status(fault, copy, Path(scratch)))
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
    return {CAUGHT: "caught", SURVIVED: "survived", -signal.SIGALRM: "caught"}.get(code, f"error {code}")


def exit_status(fault: Fault, copy: Path, scratch: Path) -> int:
    """Run pytest in this forked process and return its exit status. An alarm ends a test that hangs."""
    signal.alarm(LIMIT_S)
    torch.set_num_threads(1)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)  # for the tests' child processes
    os.chdir(ROOT)
    log = os.open(scratch / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import shoal

    if not str(shoal.__file__).startswith(str(copy)):
        return ELSEWHERE
    chosen = ["-k", fault.only] if fault.only else []
    return int(pytest.main([f"tests/{fault.tests}", *chosen, "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]))


if __name__ == "__main__":
    sys.exit(main())

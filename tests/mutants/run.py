"""Applies each fault of `faults` to a copy of the source and runs the tests meant to catch it. Survivors: status 1.

    make mutants ARGS="--only toploc --out survivors.json"

PyTorch, transformers and pytest are imported once; a fault then costs a fork. Invariant: the checkout is not changed, and a
child that imports Shoal from anywhere but its copy counts as a failure of the run, not of the fault.
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
import transformers  # noqa: F401  imported for the children

from .faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
ELSEWHERE, CAUGHT, SURVIVED = 99, 1, 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON; it is continued if it exists")
    given = parser.parse_args()
    known = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    chosen = [fault for fault in FAULTS if given.only in fault.name and fault.name not in known]
    for number, fault in enumerate(chosen):
        started_s = time.monotonic()
        known[fault.name] = found = outcome(fault)
        sys.stdout.write(f"{number + 1}/{len(chosen)} {found:9} {time.monotonic() - started_s:5.1f} s  {fault.name}\n")
        sys.stdout.flush()
        if given.out:
            given.out.write_text(json.dumps(known, indent=1) + "\n")
    survivors = [name for name, found in known.items() if found != "caught"]
    sys.stdout.write(
        f"{len(known)} faults, {len(survivors)} not caught\n" + "".join(f"  {name}\n" for name in survivors)
    )
    return int(bool(survivors))


def outcome(fault: Fault) -> str:
    """caught, survived, or what went wrong."""
    if not sound(fault.tests, fault.only):
        return "tests fail without it"
    return ended(fault)


@cache
def sound(tests: str, only: str) -> bool:
    """Whether the tests pass without any fault."""
    return ended(Fault("__init__.py", "", "", tests, only)) == "survived"


def ended(fault: Fault) -> str:
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
            os._exit(tested(fault, copy, Path(scratch)))
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
    return {CAUGHT: "caught", SURVIVED: "survived", -signal.SIGALRM: "caught"}.get(code, f"error {code}")


def tested(fault: Fault, copy: Path, scratch: Path) -> int:
    """pytest's exit status, in a process of its own. A test that hangs is ended by the alarm."""
    signal.alarm(LIMIT_S)
    torch.set_num_threads(1)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)  # of the tests' own children
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

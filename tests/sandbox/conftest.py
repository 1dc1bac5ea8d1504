"""A sandbox of each tier, and helpers that run programs in it and watch processes from outside."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.sandbox import TIERS, Program, ProgramLimits, Result, Sandbox, problem

WIDE = ProgramLimits(wall_s=60.0, cpu_s=20.0)  # for programs that must not hit a limit on a busy machine


@pytest.fixture(scope="module", params=TIERS)
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if reason := problem(request.param):
        pytest.skip(reason)
    with Sandbox(request.param, WIDE) as sandbox:
        yield sandbox
        (server,) = sandbox._idle.queue
        assert server is None or len(descendants(server._process.pid)) <= 2, "a test left processes behind"


def attack(box: Sandbox, source: str, limits: ProgramLimits = WIDE) -> Result:
    """Run a hostile program, which prints ESCAPED if its attack succeeds, and then a normal program."""
    result = box.run(Program(source), limits)
    assert b"ESCAPED" not in result.stdout, result
    assert_works(box)
    return result


def assert_works(box: Sandbox) -> None:
    result = box.run(Program("import os; print(os.listdir('.'), input())", b"fine"), WIDE)
    assert (result.outcome, result.stdout, result.stderr) == ("exited", b"[] fine\n", b"")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return children + [deeper for child in children for deeper in descendants(child)]


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)

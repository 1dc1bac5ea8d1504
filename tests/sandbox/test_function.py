"""Functions called in child processes of the sandbox: every call gets an answer, whatever the function does."""

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.sandbox import PLAIN, Budget, ProgramLimits, RemoteFunction, Sandbox, StartError

from .conftest import alive

MODULE = """
import os, signal, sys, time
kept = []
def act(value):
    what, *more = value
    kept.append(what)
    if what == "add": return sum(more)
    if what == "state": return [len(kept), hash("a"), os.getpid(), os.getppid()]
    if what == "spin":
        while True: pass
    if what == "work":
        while time.process_time() < more[0]: pass
    if what == "sleep": time.sleep(more[0])
    if what == "raise": raise ValueError("no " + "x" * more[0])
    if what == "exit": sys.exit(3)
    if what == "leave": os._exit(3)
    if what == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if what == "memory": return len(bytearray(more[0]))
    if what == "flood": return "x" * more[0]
    if what == "object": return object()
    if what == "set": return {1}
    if what == "dict": return {"a": [1.5, None]}
    if what == "print": print("noise", flush=True); return 1
    if what == "fork":
        child = os.fork()
        if child == 0: time.sleep(600)
        return child
    if what == "where": return [os.getcwd(), os.environ.get("HOME"), sys.executable]
    if what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: pass
"""
PROGRAM = "import channel, module; channel.serve(module.act)"
LIMITS = ProgramLimits(cpu_s=0.3, wall_s=20.0, memory_bytes=256 << 20)


def remote(limits: ProgramLimits = LIMITS, module: str = MODULE, **options: Any) -> RemoteFunction:
    return RemoteFunction(Sandbox(PLAIN, limits, preloaded={"module": module}, **options), PROGRAM)


@pytest.fixture(scope="module")
def function() -> Iterator[RemoteFunction]:
    shared = remote()
    yield shared
    shared.close()


def test_values_come_back_in_order(function: RemoteFunction) -> None:
    assert [call.value for call in function.calls([["add", n, 1] for n in range(20)])] == list(range(1, 21))
    assert function.calls([]) == []
    assert function.call(["dict"]).value == {"a": [1.5, None]}
    assert [call.value for call in function.calls([["print"], ["add", 4]])] == [1, 4], (
        "printed text was taken for an answer"
    )


@pytest.mark.parametrize(
    ("value", "ending", "detail"),
    [
        (["spin"], "timeout", ""),
        (["deaf"], "timeout", ""),
        (["raise", 1], "raised", "ValueError: no x"),
        (["raise", 10_000], "raised", "ValueError: no x"),
        (["exit"], "raised", "SystemExit"),
        (["leave"], "died", "exit code 3"),
        (["crash"], "died", "exit code -11"),
        (["memory", 1 << 30], "raised", "MemoryError"),
        (["flood", 2_000_000], "output", ""),
        (["object"], "raised", "WireError"),
        (["set"], "died", "a set or a dict"),
    ],
)
def test_every_ending_of_a_call_is_reported_and_the_next_call_works(
    function: RemoteFunction, value: list[object], ending: str, detail: str
) -> None:
    bad, good = function.calls([value, ["add", 2, 3]])
    assert bad.ending == ending and detail in bad.detail and len(bad.detail) < 600
    assert (good.ending, good.value) == ("answered", 5)


def test_a_waiting_call_ends_at_its_wall_time_limit_and_uses_no_cpu_time(function: RemoteFunction) -> None:
    short = remote(ProgramLimits(wall_s=0.5))
    assert [call.ending for call in short.calls([["sleep", 60], ["add", 1]])] == ["timeout", "answered"]
    short.close()
    waited = function.call(["sleep", 1.0])
    assert waited.ending == "answered" and waited.cpu_s < 0.3, "waiting must not count as CPU time"


def test_no_call_starts_after_the_end_of_the_budget() -> None:
    late = remote(budget=(budget := Budget()))
    budget.start(0)
    assert [call.ending for call in late.calls([["add", 1], ["add", 2]])] == ["late", "late"]
    budget.stop()
    assert late.call(["add", 1]).ending == "answered"
    late.close()


def test_usage_is_measured_and_a_call_that_uses_over_half_a_limit_is_not_repeatable(function: RemoteFunction) -> None:
    patient = remote(ProgramLimits(cpu_s=20.0, wall_s=40.0, memory_bytes=256 << 20))  # a busy machine allocates slowly
    large, huge = patient.calls([["memory", 100 << 20], ["memory", 150 << 20]])
    assert large.repeatable and not huge.repeatable
    patient.close()
    idle, worked = function.calls([["add", 1], ["work", 0.2]])
    assert idle.repeatable and worked.cpu_s >= 0.2 > idle.cpu_s and not worked.repeatable


def test_each_call_starts_from_the_same_state_and_hashes_are_the_same_everywhere(function: RemoteFunction) -> None:
    first, second = (call.value for call in function.calls([["state"], ["state"]]))
    assert first[:2] == second[:2] and first[0] == 1
    assert first[2] != second[2], "both calls ran in one child"
    other = remote()
    assert other.call(["state"]).value[1] == first[1]
    other.close()


def test_a_function_runs_as_the_user_with_installed_packages_and_leaves_nothing_behind(
    function: RemoteFunction,
) -> None:
    assert function.call(["where"]).value == [str(Path.cwd()), os.environ.get("HOME"), sys.executable]
    assert not alive(function.call(["fork"]).value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"module": "import no_such_module"}, "ModuleNotFoundError: No module named 'no_such_module'"),
        ({"module": "x ="}, "SyntaxError"),
        ({"python": "/no/python"}, "/no/python"),
    ],
)
def test_a_failed_start_gives_its_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError, match=message):
        remote(**options).call([1])


def test_limits_may_be_infinite() -> None:
    function = remote(ProgramLimits(wall_s=math.inf, cpu_s=math.inf, memory_bytes=1 << 40))
    assert function.call(["add", 1, 2]).value == 3
    function.close()


def test_a_kept_child_answers_many_calls_and_its_limits_decide_nothing() -> None:
    """Its CPU time is limited over its whole life, so a call that it does not answer is repeated in a fresh child."""
    burn = (
        "import os, time\n"
        "def burn(seconds):\n"
        "    end = time.process_time() + seconds\n"
        "    while time.process_time() < end: pass\n"
        "    return os.getpid()\n"
    )
    limits = ProgramLimits(wall_s=60.0, cpu_s=1.0)
    with Sandbox("plain", limits, preloaded={"burner": burn}) as sandbox:
        function = RemoteFunction(sandbox, "import burner, channel; channel.serve(burner.burn)")
        calls = [function.call_kept(seconds) for seconds in (0.0, 0.0, 0.6, 0.6, 5.0, 0.0)]
    endings = [call.ending for call in calls]
    assert endings == ["answered"] * 4 + ["timeout", "answered"]
    assert calls[0].value == calls[1].value == calls[2].value != calls[3].value

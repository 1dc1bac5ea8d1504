"""The environment `python`: which text is a program, and how it is answered."""

from collections.abc import Iterator

import pytest

from shoal.config import ConfigError
from shoal.sandbox import Budget, ProgramLimits
from shoal.tasks import Task
from shoal.tasks.environments import close, environments_of
from shoal.tasks.environments.python import (
    MAX_OUTPUT,
    MAX_PROGRAM,
    NO_OUTPUT,
    STOPPED,
    Python,
    last_program,
)

from ..turns import config

TASK = Task("arithmetic/0", "2 + 3", "5", "arithmetic")
LIMITS = ProgramLimits(wall_s=60.0, cpu_s=2.0, memory_bytes=256 << 20)


@pytest.fixture(scope="module")
def tool() -> Iterator[Python]:
    tool = Python(LIMITS)
    yield tool
    tool.close()


def turns(program: str) -> list[str]:
    return [f"I compute:\n```python\n{program}\n```\nDone."]


def answer(tool: Python, program: str) -> str | None:
    return tool.respond(TASK, 0, turns(program))


# --- what counts as a program ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```", "a"),
        ("```py\na\n```", "a"),
        ("```Python3\na\n```", "a"),
        ("```python\na\n```\n```python\nb\n```", "b"),
        ("```python\na\n```\n```python\nb", "a"),
        ("```python\na\n```\n```\nb\n```", "a"),
        ("  ```python\n  a\n  ```", "a"),
        ("```python\na\n```python\nb\n```", "b"),
        ("```\n```python\na\n```\n```", "a"),
        ("```python a ```", None),
        ("```python\n```", ""),
        ("```python\na", None),
        ("python\na\n", None),
        ("```python\n" * 100_000, None),
        ("```" * 100_000, None),
        ("", None),
    ],
)
def test_the_last_closed_block_marked_as_python_counts(text: str, program: str | None) -> None:
    assert last_program(text) == program


def test_a_turn_without_a_program_ends_the_conversation(tool: Python) -> None:
    assert tool.respond(TASK, 0, [*turns("print(1)"), "The answer is 1."]) is None


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print(12*7)", "84"),
        ("print(1)\nprint(2)", "1\n2"),
        ("x = 1", NO_OUTPUT),
        ("print(1)\nprint(1/0)", "1\nZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "error: exit status 3"),
        ("import random; print(random.randrange(10**9))", "906691059"),
        ("print({'b', 'a', 'c'} == {'a', 'b', 'c'}, lambda: 0)", "True <function <lambda> at 0x0>"),
        ("import time; print(time.time())", "error: module time is not available"),
        ("x = 1; import os", "error: module os is not available"),
        ("from datetime import date", "error: module datetime is not available"),
        ("x = [0] * 10**10", STOPPED["memory"]),
        ("while True: pass", STOPPED["timeout"]),
        ("while True: print('x' * 1000)", STOPPED["output"]),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", STOPPED["output"]),
        ("print(1)\ndef f(): f()\nf()", STOPPED["depth"]),
        ("x = []\nfor i in range(5000): x = [x]\nprint(len(str(x)))", STOPPED["depth"]),
        ("import _signal\n_signal.raise_signal(9)", STOPPED["killed"]),
        (f"print('x' * {MAX_OUTPUT + 1})", "x" * MAX_OUTPUT + "..."),
        (f"print('x' * {MAX_OUTPUT})", "x" * MAX_OUTPUT),
        ("#" * (MAX_PROGRAM + 1), f"error: a program has at most {MAX_PROGRAM} characters"),
    ],
)
def test_each_program_gets_the_expected_answer(tool: Python, program: str, expected: str) -> None:
    assert answer(tool, program) == expected


def test_no_state_passes_from_turn_to_turn(tool: Python) -> None:
    assert answer(tool, "x = 5\nopen('left', 'w').write('x')\nprint(x)") == "5"
    assert answer(tool, "print(x)") == "NameError: name 'x' is not defined"
    assert str(answer(tool, "open('left')")).startswith("FileNotFoundError")


@pytest.mark.parametrize(
    "program",
    [
        "__import__('os').fork()",
        "while True: __import__('os').fork()",
        "__import__('socket').socket()",
        "open('/etc/passwd')",
        "__import__('os').kill(1, 9)",
        "__import__('os').listdir('/root')",
        "__import__('ctypes').CDLL(None).fork(); raise SystemExit(1)",
        "while True: open(str(id([])), 'a').write('x' * 10**6)",
        "print(",
    ],
)
def test_a_hostile_program_is_answered_with_an_error_and_the_next_program_runs(tool: Python, program: str) -> None:
    text = str(answer(tool, program))
    assert "Error" in text or text.startswith("error: "), text
    assert answer(tool, "print(1)") == "1"


def test_a_budget_that_runs_out_stops_a_program(tool: Python) -> None:
    budget = Budget()
    budget.start(0.5)
    tool.set_budget(budget)
    try:
        assert answer(tool, "while True: pass") == STOPPED["timeout"] and budget.over
    finally:
        tool.set_budget(Budget())


# --- configs ---------------------------------------------------------------------------------------------------------


def test_sources_share_one_sandbox_with_the_runs_limits() -> None:
    sources = [
        {"generator": "arithmetic", "environment": "python"},
        {"generator": "arithmetic", "name": "more", "environment": "python"},
    ]
    environments = environments_of(config(tasks={"sources": sources, "sandbox": {"cpu_s": 1.5}}))
    tool = environments["arithmetic"]
    assert isinstance(tool, Python) and tool is environments["more"]
    assert tool.sandbox.limits.cpu_s == 1.5
    close(environments)
    assert answer(tool, "print(1)") == STOPPED["sandbox"], "`close` must close the sandbox"


def test_the_environment_is_refused_at_the_start_without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.sandbox.pool.problem", lambda tier: f"no {tier}")
    with pytest.raises(
        ConfigError, match="'python' cannot run on this machine: no sandbox .*\nno bubblewrap\nno kernel"
    ):
        environments_of(config(tasks={"sources": [{"generator": "arithmetic", "environment": "python"}]}))

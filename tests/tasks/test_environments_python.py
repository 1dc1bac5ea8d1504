"""The environment `python`: which text is a program, how it is answered, and which other answers are tolerated."""

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
    refusal,
)
from shoal.tasks.inside.plain import plain

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


def tolerated(tool: Python, program: str) -> list[str] | None:
    answers = tool.tolerated(TASK, 0, turns(program))
    return None if answers is None else list(answers)


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
        ("  ```python\n  a\n  ```", "  a"),
        ("```python\na\n```python\nb\n```", "a\n```python\nb"),
        ("```\n```python\na\n```\n```", None),
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


# --- which answers are tolerated -------------------------------------------------------------------------------------


PLAIN = [
    "print(12 * 7)",
    "def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)\nprint(f(10))",
    "total = 0\nfor i, x in enumerate([3, 4]):\n    total += i * x\nprint(f'total: {total}')",
    "print(sum(x * x for x in range(10)), max([1, 2]), list(zip([1], [2])))",
    "a = {'x': 1.5}\na['y'] = a['x'] / 3\nprint(a, ', '.join(str(x) for x in a))",
    "xs = [3, 1]\nxs.sort()\nxs.append(2 ** 10)\nprint(xs, f'{xs[0]:.2f}')",
    "x = 3\nwhile x > 0 and not x == 1:\n    x -= 1\nprint(x if x else None, x in [1], -x)",
]


@pytest.mark.parametrize("program", PLAIN)
def test_a_plain_program_tolerates_only_its_own_answer_and_limits(tool: Python, program: str) -> None:
    assert plain(program)
    assert tolerated(tool, program) == [*STOPPED.values(), answer(tool, program)]


# Each may print different text on another machine, at another time, or with another version of Python.
DOUBTFUL = [
    "import random\nprint(random.random())", "import math\nprint(math.exp(1.5))", "print(__import__('time').time())",
    "print(__import__('os').urandom(1))", "print(__builtins__)", "print(id(0))", "print(hash('a'))", "print(open)",
    "print(lambda: 0)", "print((x for x in [1]))", "print(str(zip())[-5:])", "print([].append)",
    "def f(): pass\nprint(f)", "def f(): pass\nx = [f]\nprint(x)", "def f(): return f\nprint(f())",
    "f = 1\ndef f(): pass\nprint(f)", "print = str\nprint(1)", "print(sum([0.1] * 10))", "print(2.5 ** 3)",
    "n = -1\nprint(2 ** n)", "print(2 ** -1)", "x = 3\nx **= -1\nprint(x)", "print(sum([1 / 3, 1 / 7, 1 / 9]))",
    "print(sorted([float('nan'), 1]))", "x = [float('nan'), 1]\nx.sort()\nprint(x)",
    "def list(x): return x\nprint(list(x for x in [1]))", "print('a'.encode())", "print(f'{1}\\n')",
    "print({'a', 'b'})", "print({x for x in 'ab'})", "print('%c' % 1000)", "print(f'{1000:c}')", "print(f'{1:{2}}')",
    "print('é')", "print('\\u00e9')", "x = 1000\nprint(x is 1000)",
    "try:\n    1 / 0\nexcept Exception as e:\n    print(e)", "print(f'{\"a\"}')", "print(f'{chr(65)}')",
    "print('{0.__class__}'.format(print))", "print(1 .__class__)", "class A: pass\nprint(A())", "print(type(1))",
    "print('\\d')", "print(1)if 1else 2", "print(1, end='\\r')\rprint(2)", "if (x := 3): print(x)",
    "from fractions import Fraction", "print(1j)", "print(b'x')", "def f(n: int): return n\nprint(f(1))",
    "assert False", "match 1:\n    case x: print(x)", "async def f(): pass", "with open('x') as f: pass",
    "def f():\n    yield 1\nprint(f())", "x" + "(" * 190 + ")" * 190,
]  # fmt: skip


@pytest.mark.parametrize("program", DOUBTFUL)
def test_a_program_that_is_not_plain_tolerates_every_answer(tool: Python, program: str) -> None:
    assert not refusal(program), "the program is refused, so it tests nothing here"
    assert tolerated(tool, program) is None


@pytest.mark.parametrize(
    "program",
    [
        "print(1 / 0)",
        "print(x)\nx = 1",
        "while True:\n    x = 1",
        "x = [0] * 10**10",
        "while True:\n    print('x')",
        "def f(n):\n    return 0 if n == 0 else f(n - 1)\nprint(f(4000))",
        "print(10 ** 5000)",
    ],
)
def test_a_plain_program_that_may_fail_elsewhere_tolerates_every_answer(tool: Python, program: str) -> None:
    assert plain(program)
    assert tolerated(tool, program) is None


def test_a_plain_program_beyond_half_of_a_limit_tolerates_every_answer() -> None:
    program = f"x = [0] * {(150 << 20) // 8}\nprint(len(x))"  # 150 MiB
    for memory, is_lie in ((1024 << 20, True), (256 << 20, False)):
        tool = Python(ProgramLimits(wall_s=60.0, cpu_s=30.0, memory_bytes=memory))
        assert answer(tool, program) == str((150 << 20) // 8)
        assert (tolerated(tool, program) is not None) == is_lie
        tool.close()


def test_a_program_that_does_not_run_tolerates_no_other_answer(tool: Python) -> None:
    assert tolerated(tool, "import time") == []
    assert tool.tolerated(TASK, 0, ["no program"]) == ()


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

"""The reward `code`: which programs pass or fail, and their grades. `test_code_redteam` has the attacks.

If `HumanEval.jsonl.gz` is in the folder SHOAL_DATA or in ../shared/data, also test that HumanEval's solutions pass and
that mutants of them fail.
"""

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.sandbox import TIERS, ProgramLimits, Tier, best_tier, problem
from shoal.tasks import Grade, Task
from shoal.tasks.rewards.code import Code, programs_of
from shoal.tasks.rewards.compare import Pairs, SetItems, same_output, same_value, shown
from shoal.tasks.sources.code_tests import read_tests

from . import humaneval

ADD = {"kind": "functional", "entry": "add", "cases": [{"args": [1, 2], "output": 3}, {"args": [-1, 1], "output": 0}]}
ECHO = {"kind": "stdin", "cases": [{"input": "3\n1 2 3\n", "output": "6\n"}, {"input": "1\n5", "output": "5"}]}


def asserts(code: str) -> dict[str, str]:
    return {"kind": "asserts", "entry": "f", "code": code}


@pytest.fixture(scope="module")
def code() -> Iterator[Code]:
    reward = Code(ProgramLimits(), best_tier(), size=2)
    yield reward
    reward.close()


@contextmanager
def limited(**limits: float) -> Iterator[Code]:
    with closing(Code(ProgramLimits(**limits), best_tier(), size=1)) as reward:  # type: ignore[arg-type]
        yield reward


def grade(code: Code, tests: Any, completion: str) -> Grade:
    task = Task("t/1", "", "", tests=tests if isinstance(tests, str) else json.dumps(tests))
    return code.grade([task], [completion])[0]


def test_the_tests_of_a_task_are_parsed_once_for_all_its_completions(
    code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing them again would take long, because the tests may be many megabytes of JSON."""
    read: list[str] = []
    monkeypatch.setattr("shoal.tasks.rewards.code.read_tests", lambda text: read.append(text) or read_tests(text))
    one, other = (Task(f"t/{n}", "", "", tests=tests) for n, tests in enumerate((json.dumps(ADD), "no JSON")))
    right, wrong = "def add(a, b): return a + b", "def add(a, b): return 7"
    grades = code.grade([one, one, other, one, other], [right, wrong, right, right, wrong])
    assert [grade.score for grade in grades] == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert [grade.outcome for grade in grades] == ["graded", "graded", "grader_error", "graded", "grader_error"]
    assert sorted(read) == sorted([one.tests, other.tests])


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("First\n```python\nx = 1\n```\nbetter:\n```py\nx = 2\n```\nDone", "x = 2\n"),
        ("```python\nx = 1\n```\nIt prints\n```\n1\n```", "x = 1\n"),  # the block marked as Python counts
        ("```\nx = 1\n```", "x = 1\n"),
        ("```Python3\nx = 1", "x = 1"),  # the completion was cut off
        ("  ```python\n  x = 1\n  ```", "x = 1\n"),
        ("1. Code:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("````python\nx = 1\n```\n````", "x = 1\n```\n"),  # a closing fence is at least as long
        ("```python\nx = 1\n~~~\n```", "x = 1\n~~~\n"),
        (
            '```python\ndef f():\n    """\n    ```\n    """\n```',
            'def f():\n    """\n    ```\n    """\n',
        ),  # deeper than 3
        ("```python\nx = (\n```python\nx = 2\n```", "x = 2\n"),  # the first block was not finished
        ('```python title="x.py"\nx = 1\n```\n```\n1\n```', "x = 1\n"),
        ("```Python 3\nx = 1\n```\n```\n1\n```", "x = 1\n"),
        ("```{.python}\nx = 1\n```\n```\n1\n```", "x = 1\n"),
        ("<think>```python\nx = 1\n```</think>\n```python\nx = 2\n```", "x = 2\n"),
        ("<think>```python\nx = 1\n</think>```py\nx = 2\n```", "x = 2\n"),
        ("<think>```python\nx = 1\n```", ""),  # cut off in its thoughts
        ("```pycon\n1\n```\n```python\nx = 1\n```\n```pyramid\n1\n```", "x = 1\n"),
        ("```x```\n```python\ny\n```", "y\n"),
        ("", ""),
    ],
)
def test_the_last_block_marked_as_python_is_the_program(completion: str, program: str) -> None:
    assert programs_of(completion)[0] == program


@pytest.mark.parametrize("tests", ["functional", "stdin"])
def test_a_fence_inside_of_a_string_does_not_end_the_program(code: Code, tests: str) -> None:
    text = "'''\n```\nx\n```\n'''"
    add = f"```python\nX = {text}\ndef add(a, b):\n    return a + b\n```\nDone.\n```\n3\n```"
    read = f"```python\nX = {text}\ninput()\nprint(sum(map(int, input().split())))\n```"
    assert grade(code, *((ADD, add) if tests == "functional" else (ECHO, read))).score == 1
    wrong = add.replace("a + b", "a - b")
    assert (grade(code, ADD, wrong).score, grade(code, ADD, "```python\n)\n```").outcome) == (0, "wrong_format")


LIVECODEBENCH = [
    "Counter(data)", "floor(2.5)", "math.floor(2.5)", "sys.maxsize", "deepcopy(data)", "copy.copy(data)", "sin(pi)",
    "timedelta(1)", "heappush([], 1)", "bisect_left([1], 1)", "json.dumps(data)", "io.StringIO()", "mean([1])", "gcd(4, 6)",
    "reduce(add, data)", "List[int]", "deque()", "accumulate(data)", "ascii_lowercase", "re.compile('x')", "deep(5000)",
    "len(str(10**5000))", "int('1' * 5000)",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["stdin", "functional"])
def test_programs_may_use_the_imports_of_livecodebench_and_long_numbers_and_deep_recursion(
    code: Code, kind: str
) -> None:
    start = "from __future__ import annotations\ndef deep(n): return 0 if n == 0 else 1 + deep(n - 1)\n"
    uses = "".join(f"    {use}\n" for use in LIVECODEBENCH)
    if kind == "stdin":
        tests = {"kind": "stdin", "cases": [{"input": "", "output": "6"}]}
        result = grade(code, tests, f"{start}data = [1]\nif data:\n{uses}print(6)\n")
    else:
        result = grade(
            code,
            ADD,
            f"{start}def add(a, b):\n    data = [1]\n{uses.replace('reduce(add, data)', '0')}    return a + b\n",
        )
    assert result.score == 1, result.detail


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 \r\n\n3", "1 2\n3", True),  # spaces and blank lines do not count
        ("1 2 3", "1 2\n3", False),
        ("1\n2\n", "1\n", False),
        ("yes", "YES", False),
        ("0.3333333", "0.33333333", True),
        ("0.333", "0.33333333", False),
        ("3.0", "3", True),
        ("3.0000001", "3", False),  # whole numbers are compared exactly
        ("1000000007", "1000000008", False),
        ("1.0e0", "1.0", True),
        ("101", "0101", False),
        ("0", "00", False),
        ("7", "007", False),
        ("007", "7", False),
        ("-0", "0", True),
        ("12000", "12e3", False),
        ("12e3", "12000", False),
        ("1e-07", "0.0000001", True),
        ("1e+16", "10000000000000000", True),
        ("0.50", "0.5", True),
        ("00.5", "0.5", False),
        ("nan", "1.0", False),
        ("inf", "1e99999", False),
        ("9" * 5000, "9" * 4999 + "8", False),
        ("\u0661", "1", False),
        ("", "", True),
    ],
)
def test_outputs_are_compared_word_by_word(actual: str, expected: str, same: bool) -> None:
    assert same_output(actual, expected) is same


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        (3, 3, True),
        (3, 4, False),
        (True, 1, True),
        (1.0, 1, True),
        (1.0000001, 1, False),
        (1.0000001, 1.0, True),
        (float("nan"), 1.0, False),
        (float("nan"), float("nan"), False),
        (float("inf"), float("inf"), True),
        (10**400, 1.0, False),
        (10**400, 10**400, True),
        ("1", 1, False),
        (None, None, True),
        ((1, 2), [1, 2], True),
        ([1, [2, (3,)]], [1, [2, [3]]], True),
        ([1, 2], [2, 1], False),
        (SetItems([1, 2]), [1, 2], False),
        (Pairs([(1, "a")]), {"1": "a"}, True),
        (Pairs([("a", [1.0000001])]), {"a": [1.0]}, True),
        (Pairs([("a", 1), ("a", 2)]), {"a": 2}, False),
        (Pairs([((1, 2), 1)]), {"(1, 2)": 1}, False),
        (b"a", "a", False),
        (1 + 0j, 1, True),
    ],
)
def test_values_are_compared_as_builtins(actual: Any, expected: Any, same: bool) -> None:
    assert same_value(actual, expected) is same


def test_a_value_is_formatted_in_bounded_space() -> None:
    assert shown(1 << 100_000) == "an int of 100001 bits"
    assert all(len(shown(value)) <= 120 for value in ("x" * 10_000, [["y" * 99] * 99] * 99, SetItems([1]), 1 << 150))


@pytest.mark.parametrize(
    ("tests", "completion", "score", "outcome", "detail"),
    [
        (ADD, "def add(a, b): return a + b", 1, "graded", "2 of 2 cases pass"),
        (ADD, "class Solution:\n    def add(self, a, b): return a + b", 1, "graded", "2 of 2"),
        (ADD, "add = lambda a, b: a + b\nif __name__ == '__main__': raise SystemExit", 1, "graded", "2 of 2"),
        (ADD, "print('hi')\ndef add(a, b):\n    print(a)\n    return a + b", 1, "graded", "2 of 2"),
        (
            ADD,
            "def add(a: List[int], b): return reduce(operator.add, [a, b])",
            1,
            "graded",
            "2 of 2",
        ),  # it uses `List`, `reduce` and `operator` without imports
        (ADD, "def add(a, b): return 3", 0, "graded", "case 2 of 2: returned 3, expected 0"),
        (ADD, "def add(a, b): return 1 / 0", 0, "graded", "case 1 of 2: raised ZeroDivisionError: division by zero"),
        (ADD, "def add(a, b): return object()", 0, "graded", "case 1 of 2: not plain data: object"),
        (ADD, "def plus(a, b): return a + b", 0, "graded", "NameError: the program defines no add"),
        (ADD, "1 / 0", 0, "graded", "its definitions raise ZeroDivisionError"),
        (ADD, "def add(a, b) return a", 0, "wrong_format", "does not parse"),
        (ADD, "The answer is 5.", 0, "wrong_format", "does not parse"),
        (ADD, "", 0, "wrong_format", "0 characters"),
        (ADD, "x = 1\n" * 100_000, 0, "wrong_format", "600000 characters"),
        (ADD, "(" * 100_000, 0, "wrong_format", "does not parse"),
        (ADD, "x = '\ud800'\ndef add(a, b): return a + b", 1, "graded", "2 of 2"),
        (ECHO, "n = int(input())\nprint(sum(map(int, input().split())))", 1, "graded", "2 of 2"),
        (ECHO, "import sys\nprint(sum(map(int, sys.stdin.read().split()[1:])), '\\n')", 1, "graded", "2 of 2"),
        (ECHO, "print(6)", 0, "graded", "case 2 of 2: printed '6\\n', expected '5'"),
        (ECHO, "print(6", 0, "wrong_format", "SyntaxError"),
        (ECHO, "1 / 0", 0, "graded", "case 1 of 2: it ended with exit code 1: ZeroDivisionError"),
        (ECHO, "print(6); raise SystemExit(3)", 0, "graded", "exit code 3"),
    ],
)
def test_each_program_gets_the_expected_grade(
    code: Code, tests: Any, completion: str, score: float, outcome: str, detail: str
) -> None:
    result = grade(code, tests, completion)
    assert (result.score, result.outcome) == (score, outcome), result
    assert detail in result.detail
    assert result.repeatable


PROMPT = """
def helper(x):
    return x + 1

def f(x):
    '''What it does.'''
"""
CHECK = """
def check(candidate):
    assert candidate(1) == helper(2)
    assert candidate({1: (2.5, b'x', None, {3})}) == 'dict'
"""
BODY = """
    if isinstance(x, dict):
        return 'dict' if x == {1: (2.5, b'x', None, {3})} else x
    return helper(x) + 1
"""
ASSERTS = {"kind": "asserts", "entry": "f", "prompt": PROMPT, "code": CHECK}


@pytest.mark.parametrize(
    ("completion", "score", "detail"),
    [
        (BODY, 1, "pass"),  # the completion is the rest of the function
        ("def f(x):\n" + BODY, 1, "pass"),  # it is the whole function, and uses the prompt's helper
        ("```python\nif isinstance(x, dict): return 'dict'\nreturn x + 2\n```", 1, "pass"),  # not indented
        ("    return x + 2", 0, "call 2: TypeError"),
        ("    return 3", 0, "call 2: AssertionError"),
        ("    pass", 0, "call 1: AssertionError"),
        ("    return {}.x", 0, "call 1: AttributeError: 'dict' object has no attribute 'x'"),
    ],
)
def test_assertions_call_the_function_from_another_process(
    code: Code, completion: str, score: float, detail: str
) -> None:
    result = grade(code, ASSERTS, completion)
    assert (result.score, result.outcome) == (score, "graded"), result
    assert detail in result.detail


@pytest.mark.parametrize(
    ("tests", "detail"),
    [
        ("", "the task has no tests: name their column"),
        ('"assert f(1) == 2"', """the task's tests are "assert f(1) == 2", not an object"""),
        ("{}", "cannot be read"),
        ('{"kind": "other"}', "known: stdin, functional, asserts"),
        ('{"kind": "stdin", "cases": []}', "no cases"),
        ('{"kind": "stdin", "cases": [{"input": 1, "output": ""}]}', "int instead of text"),
        (asserts("def check(:"), "SyntaxError"),
        (asserts("assert Missing(1)"), "NameError"),
        (asserts("def check(candidate): pass"), "they never call the function"),
        (asserts("candidate(lambda: 1)"), "not plain data: function"),
        (asserts("import os\nos._exit(0)"), "the tests' process died"),
    ],
)
def test_faulty_tests_are_a_grader_error(code: Code, tests: Any, detail: str) -> None:
    result = grade(code, tests, "def f(x): return x")
    assert (result.score, result.outcome, result.repeatable) == (0, "grader_error", False)
    assert detail in result.detail


def test_tests_may_use_plain_asserts_and_builtin_exceptions(code: Code) -> None:
    tests = "assert f(2) == 4\ntry:\n    f('x')\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'"
    right = "def f(x):\n    if x == 'x': raise ValueError('no')\n    return x * x"
    assert grade(code, asserts(tests), right).score == 1
    assert grade(code, asserts(tests), "def f(x): return x * x").score == 0


def test_values_of_every_plain_type_are_passed_in_both_directions(code: Code) -> None:
    values = (
        "[None, True, 0, -1, 1 << 4000, -(1 << 4000), 1.5, float('inf'), 2j, '', 'a\\ud800\\U0001f600', b'\\0', [], (), "
        "(1, [2]), set(), {1, (2, 3)}, frozenset({1}), {}, {'a': {1: None}}]"
    )
    types = "assert list(map(type, candidate(*v))) == list(map(type, v))"
    tests = f"v = {values}\nassert candidate(*v, key=v) == v\n{types}"
    assert grade(code, asserts(tests), "def f(*v, key=None): return list(v)").score == 1
    subclasses = (
        "import collections, enum\nclass E(enum.IntEnum):\n    A = 1\nP = collections.namedtuple('P', 'x y')\n"
        "def f(): return [E.A, P(1, 2), collections.Counter('aab'), collections.OrderedDict(a=1)]"
    )
    case = {"args": [], "output": [1, [1, 2], {"a": 2, "b": 1}, {"a": 1}]}  # the values are passed as builtins
    assert grade(code, {"kind": "functional", "entry": "f", "cases": [case]}, subclasses).score == 1


@pytest.mark.parametrize(
    ("tests", "source", "limits", "detail"),
    [
        (ADD, "import time\ndef add(a, b):\n    time.sleep(1e6)", {"cpu_s": 1.0, "wall_s": 2.0}, "time limit"),
        (ADD, "def add(a, b):\n    while True: pass", {"cpu_s": 1.0, "wall_s": 2.0}, "time limit"),
        (ADD, "def add(a, b):\n    while True: print('x' * 10_000)", {"cpu_s": 1.0, "wall_s": 2.0}, "output"),
        (
            *(asserts("while candidate(1) and True:\n    while True: pass"), "def f(x): return x"),
            *({"cpu_s": 1.0, "wall_s": 4.0}, "its answers keep the tests from ending"),
        ),
        (  # a worker knows the cases, and may write a program that sleeps in each case and still passes
            {"kind": "stdin", "cases": [{"input": "", "output": "1"}] * 100},
            *("import time\ntime.sleep(0.15)\nprint(1)", {"cpu_s": 60.0, "wall_s": 0.3}, "time limit"),
        ),
    ],
    ids=["sleeps", "spins", "prints", "the tests", "all cases together"],
)
def test_a_grade_at_a_limit_is_not_repeatable(tests: Any, source: str, limits: dict[str, float], detail: str) -> None:
    with limited(**limits) as code:
        result = grade(code, tests, source)
    assert (result.score, result.outcome, result.repeatable) == (0, "graded", False)
    assert detail in result.detail
    if tests["kind"] == "stdin":
        assert int(result.detail.split()[1]) <= 20


def test_a_right_answer_near_a_limit_is_not_repeatable() -> None:
    with limited(cpu_s=60.0, wall_s=2.0) as code:
        near = "import time\ndef add(a, b):\n    time.sleep(0.55)\n    return a + b"  # it sleeps for 1.1 s in all
        assert not grade(code, ADD, near).repeatable


OWN_FRAME = """
import sys, os
def f(x):
    frame = sys._getframe()
    while "frame" not in frame.f_locals or not isinstance(frame.f_locals["frame"], bytes):
        frame = frame.f_back
    os.write(4, (8).to_bytes(4, "big") + frame.f_locals["frame"][:8])
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        (OWN_FRAME, "assert candidate(1) == 2"),
        ("def f(x): return 'a' * 600_000", "text = candidate(1)\nprint(text, text)"),
    ],
)
def test_a_program_cannot_make_the_tests_look_faulty(code: Code, source: str, tests: str) -> None:
    result = grade(code, asserts(tests), source)
    assert (result.score, result.outcome) == (0, "graded"), result


def test_many_completions_are_graded_in_order(code: Code) -> None:
    task = Task("t/1", "", "", tests=json.dumps(ADD))
    completions = [f"def add(a, b): return a + b + {n % 3}" for n in range(12)]
    assert [grade.score for grade in code.grade([task] * 12, completions)] == [float(n % 3 == 0) for n in range(12)]


# --- HumanEval --------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("SHOAL_DATA") or ROOT.parent / "shared" / "data") / "HumanEval.jsonl.gz"


@pytest.mark.skipif(not DATA.is_file(), reason=f"no {DATA}: set SHOAL_DATA to its folder")
@pytest.mark.parametrize(
    ("tier", "every"), [(None, 14), *(pytest.param(tier, 1, marks=pytest.mark.slow) for tier in TIERS)]
)
def test_canonical_solutions_of_humaneval_pass_and_mutated_solutions_fail(tier: Tier | None, every: int) -> None:
    if tier and (reason := problem(tier)):
        pytest.skip(reason)
    rows = humaneval.read(DATA)
    assert len(rows) == 164
    rows = rows[::every]
    tasks = [humaneval.task(row) for row in rows]
    with closing(Code(ProgramLimits(), tier or best_tier())) as code:
        right = code.grade(tasks, [row["canonical_solution"] for row in rows])
        wrong = code.grade(tasks, [humaneval.mutant(row) for row in rows])
    assert [grade for grade in right if grade.score != 1] == []
    assert [grade for grade in wrong if grade.score or grade.outcome != "graded"] == []
    assert {grade.tier for grade in right} == {tier or best_tier()}

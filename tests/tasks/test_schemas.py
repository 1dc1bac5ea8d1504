"""Schemas of public data sets: rows written by hand in exactly the columns that each set has."""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from shoal import tasks
from shoal.config.tasks import SourceSection, TaskSection
from shoal.tasks.sources import schemas
from shoal.tasks.sources.rows import LeftOutError, RowError, TaskFields

Row = dict[str, Any]


def read(row: Row) -> tuple[str, TaskFields]:
    schema = schemas.recognise(list(row), row)
    return schema.name, schema.read(row)


def packed(cases: list[Row]) -> str:
    """Private tests as LiveCodeBench publishes them."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


MATH_ROW = {"problem": "What is $1/4+1/4$?", "level": "Level 1", "type": "Algebra"}
LIVE = {
    "question_title": "Twice",
    "question_content": "Print twice the number.",
    "platform": "atcoder",
    "question_id": "abc_1",
    "contest_id": "abc",
    "contest_date": "2025-01-18T18:35:00",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}]),
    "private_test_cases": packed([{"input": "3\n", "output": "6\n", "testtype": "stdin"}]),
    "metadata": "{}",
}
FUNCTIONAL = LIVE | {
    "platform": "leetcode",
    "starter_code": "class Solution:\n    def add(self, xs: List[int], y: int) -> int:\n        ",
    "public_test_cases": json.dumps([{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]),
    "private_test_cases": "",
    "metadata": '{"func_name": "add"}',
}
GENESYS = {
    "problem_id": "vfc_1",
    "source": "apps",
    "task_type": "verifiable_code",
    "in_source_id": "7",
    "prompt": "Solve it in Python.",
    "gold_standard_solution": None,
    "metadata": "{}",
}
NUMBERS_AND_MATH: list[tuple[Row, str, str, str, str]] = [
    ({"question": "How many?", "answer": "1+1=<<1+1=2>>2\n#### 2"}, "GSM8K", "How many?", "2", "number"),
    ({"question": "How much?", "answer": "#### -1,250.50"}, "GSM8K", "How much?", "-1250.5", "number"),
    (MATH_ROW | {"solution": r"It is $\boxed{\frac{1}{2}}$."}, "MATH", MATH_ROW["problem"], r"\frac{1}{2}", "math"),
    (MATH_ROW | {"solution": r"\boxed{1}, so \boxed{\{1, 2\}}"}, "MATH", MATH_ROW["problem"], r"\{1, 2\}", "math"),
    (
        {
            "problem": "Find $x$.",
            "solution": "...",
            "answer": "[2,5)",
            "subject": "Algebra",
            "level": 5,
            "unique_id": "test/algebra/1.json",
        },
        "problem and answer",
        "Find $x$.",
        "[2,5)",
        "math",
    ),
    ({"problem": "Find y", "answer": r"\frac{2}", "solution": ""}, "problem and answer", "Find y", r"\frac{2}", "math"),
    (
        {"id": 60, "problem": "Every morning", "solution": "s", "answer": "204", "url": "u", "year": "2024"},
        "problem and answer",
        "Every morning",
        "204",
        "math",
    ),
    ({"problem": "Sum", "answer": "70", "id": "0"}, "problem and answer", "Sum", "70", "math"),
    (
        {
            "problem": "Compute",
            "solution": "s",
            "answer": "1/2",
            "problem_type": "Algebra",
            "question_type": "math-word-problem",
            "source": "olympiads",
            "synthetic": False,
            "problem_is_valid": "Yes",
            "solution_is_valid": "Yes",
        },
        "NuminaMath-1.5",
        "Compute",
        "1/2",
        "math",
    ),
    (
        GENESYS | {"task_type": "verifiable_math", "verification_info": '{"ground_truth": "x^2"}'},
        "SYNTHETIC-1 and INTELLECT-2",
        "Solve it in Python.",
        "x^2",
        "math",
    ),
    (
        {
            "problem_id": "verifiable_math_1",
            "task_type": "verifiable_math",
            "prompt": "Solve",
            "verification_info": '{"ground_truth": 12}',
            "metadata": "{}",
            "solve_rate_qwen_r1_distill_7b": 0.25,
        },
        "SYNTHETIC-1 and INTELLECT-2",
        "Solve",
        "12",
        "math",
    ),
    (
        GENESYS | {"task_type": "verifiable_math", "verification_info": "{'ground_truth': '3'}"},
        "SYNTHETIC-1 and INTELLECT-2",
        "Solve it in Python.",
        "3",
        "math",
    ),
    ({"question": "2 + 3", "answer": "5"}, "question and answer", "2 + 3", "5", "number"),
    ({"question": "Capital?", "answer": "Paris"}, "question and answer", "Capital?", "Paris", ""),
]  # fmt: skip


@pytest.mark.parametrize(("row", "name", "question", "answer", "reward"), NUMBERS_AND_MATH)
def test_a_row_gives_question_answer_and_reward(row: Row, name: str, question: str, answer: str, reward: str) -> None:
    found, fields = read(row)
    assert (found, fields.question, fields.answer, fields.reward) == (name, question, answer, reward)
    assert fields.tests == ""


CODE: list[tuple[Row, str, Row]] = [
    (
        {
            "task_id": "HumanEval/0",
            "prompt": "def f(x):\n",
            "entry_point": "f",
            "canonical_solution": "    return x\n",
            "test": "def check(candidate):\n    assert candidate(1) == 1\n",
        },
        "HumanEval",
        {
            "kind": "asserts",
            "entry": "f",
            "code": "def check(candidate):\n    assert candidate(1) == 1\n",
            "prompt": "def f(x):\n",
        },
    ),
    (
        {
            "task_id": 2,
            "text": "Find the shared ones.",
            "code": "def helper(x):\r\n  return x\r\ndef shared(a, b):\r\n  return set(a) & set(b)",
            "test_list": ["assert set(shared((1, 2), (2,))) == set((2,))"],
            "test_setup_code": "import math",
            "challenge_test_list": [],
        },
        "MBPP",
        {
            "kind": "asserts",
            "entry": "shared",
            "code": "import math\nassert set(shared((1, 2), (2,))) == set((2,))",
            "prompt": "",
        },
    ),
    (
        {
            "source_file": "s",
            "task_id": 3,
            "prompt": "Is it odd?",
            "code": "def odd(x):\n  return x % 2 == 1",
            "test_imports": ["import math"],
            "test_list": ["assert not odd(2)", "assert odd(3)"],
        },
        "MBPP (sanitized)",
        {"kind": "asserts", "entry": "odd", "code": "import math\nassert not odd(2)\nassert odd(3)", "prompt": ""},
    ),
    (
        {
            "problem_id": 0,
            "question": "Add.",
            "solutions": '["s"]',
            "input_output": '{"inputs": ["1 2\\n", ["3 4", "5"]], "outputs": ["3\\n", ["12"]]}',
            "difficulty": "interview",
            "url": "u",
            "starter_code": "",
        },
        "APPS",
        {"kind": "stdin", "cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "3 4\n5", "output": "12"}]},
    ),
    (
        {
            "problem_id": 122,
            "question": "Take.",
            "solutions": "",
            "input_output": '{"fn_name": "most", "inputs": [[[1, 2], 3]], "outputs": [12]}',
            "difficulty": "interview",
            "url": "u",
            "starter_code": "def most(cards, k):",
        },
        "APPS",
        {"kind": "functional", "entry": "most", "cases": [{"args": [[1, 2], 3], "output": 12}]},
    ),
    (
        {
            "question": "Wrapped.",
            "input_output": '{"fn_name": "f", "inputs": [[1], [2]], "outputs": [[true], [false]]}',
        },
        "APPS",
        {
            "kind": "functional",
            "entry": "f",
            "cases": [{"args": [1], "output": True}, {"args": [2], "output": False}],
        },
    ),
    (
        LIVE,
        "LiveCodeBench",
        {"kind": "stdin", "cases": [{"input": "1\n", "output": "2\n"}, {"input": "3\n", "output": "6\n"}]},
    ),
    (
        FUNCTIONAL,
        "LiveCodeBench",
        {"kind": "functional", "entry": "add", "cases": [{"args": [[1, 2], 3], "output": 6}]},
    ),
    (
        GENESYS
        | {
            "verification_info": json.dumps(
                {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "1\n", "output": "2\n"}]}
            )
        },
        "SYNTHETIC-1 and INTELLECT-2",
        {"kind": "stdin", "cases": [{"input": "1\n", "output": "2\n"}]},
    ),
    (
        GENESYS
        | {
            "verification_info": {
                "language": "python",
                "test_cases": [{"type": "function_call", "fn_name": "g", "input": [1, [2]], "output": 3}],
            }
        },
        "SYNTHETIC-1 and INTELLECT-2",
        {"kind": "functional", "entry": "g", "cases": [{"args": [1, [2]], "output": 3}]},
    ),
    (
        {
            "problem_id": "prime_rl_code_1",
            "task_type": "prime_rl_code",
            "prompt": "Write it.",
            "verification_info": json.dumps({"test_cases": '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'}),
            "solve_rate_qwen_r1_distill_7b": 0.5,
        },
        "SYNTHETIC-1 and INTELLECT-2",
        {"kind": "stdin", "cases": [{"input": "1\n", "output": "2\n"}]},
    ),
]


@pytest.mark.parametrize(("row", "name", "tests"), CODE)
def test_a_code_row_gives_tests_in_the_form_of_the_reward(row: Row, name: str, tests: Row) -> None:
    found, fields = read(row)
    assert (found, json.loads(fields.tests), fields.reward) == (name, tests, "code")


def test_a_question_shows_starter_code_and_the_asserts_that_mbpp_shows() -> None:
    assert "```python\nclass Solution:" in read(FUNCTIONAL)[1].question
    assert read(LIVE)[1].question == "Print twice the number."
    assert read(CODE[1][0])[1].question.endswith("pass these tests:\nassert set(shared((1, 2), (2,))) == set((2,))")


NUMINA = next(row for row, name, *_ in NUMBERS_AND_MATH if name == "NuminaMath-1.5")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (NUMINA | {"question_type": "proof", "answer": "proof"}, "a proof"),
        (NUMINA | {"answer": "notfound"}, "no answer"),
        (NUMINA | {"problem_is_valid": "Incomplete"}, "problem_is_valid is not Yes"),
        (NUMINA | {"solution_is_valid": "Problem not solved"}, "solution_is_valid is not Yes"),
        (MATH_ROW | {"solution": "It is one half."}, "no boxed answer"),
        ({"question": "Untested.", "input_output": ""}, "no tests"),
        (GENESYS | {"task_type": "llm_judgeable_groundtruth_similarity", "verification_info": "{}"}, "task type llm_j"),
        (GENESYS | {"verification_info": '{"language": "rust", "test_cases": [{}]}'}, "code in rust"),
    ],
)
def test_rows_that_their_set_marks_as_unusable_are_left_out_with_a_reason(row: Row, reason: str) -> None:
    assert NUMINA["problem_is_valid"] == "Yes"
    with pytest.raises(LeftOutError, match=reason):
        read(row)


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("unpickled",))


def b64(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize(
    ("private", "message"),
    [
        (b64(pickle.dumps(Evil())), "a pickle of more than a string, which is never loaded"),
        (b64(pickle.dumps(["[]", "[]"])), "a pickle of more than a string"),
        (b64(b"no pickle"), "not a pickled string"),
        ("?!", "neither JSON nor compressed"),
        (b64(pickle.dumps("x" * (65 << 20))), "unpacks to more than 64 MB"),
        (b64(pickle.dumps("not json")), "is not JSON"),
    ],
)
def test_private_tests_are_never_unpickled(private: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RowError, match=message):
        read(LIVE | {"private_test_cases": private})
    assert capsys.readouterr().out == ""


def test_private_tests_may_be_plain_json() -> None:
    case = {"input": "5\n", "output": "10\n", "testtype": "stdin"}
    tests = json.loads(read(LIVE | {"private_test_cases": json.dumps([case])})[1].tests)
    assert tests["cases"][1] == {"input": "5\n", "output": "10\n"}


def test_deeply_nested_json_is_a_bad_row() -> None:
    with pytest.raises(RowError, match="verification_info is not JSON"):
        read(GENESYS | {"verification_info": "[" * 65_536})


def test_unknown_columns_are_named_with_what_to_write() -> None:
    with pytest.raises(RowError, match=r'columns \(gold, text\) are of no schema .* fields = \{ question = "gold"'):
        read({"text": "?", "gold": "5"})


def test_a_mixed_source_grades_each_row_by_its_own_kind(tmp_path: Path) -> None:
    rows = [
        {
            "problem_id": f"{kind}_{n}",
            "task_type": kind,
            "prompt": f"{kind} {n}",
            "verification_info": json.dumps(info),
            "solve_rate_qwen_r1_distill_7b": 0.5,
        }
        for n in range(12)
        for kind, info in (
            ("verifiable_math", {"ground_truth": str(n)}),
            ("prime_rl_code", {"test_cases": json.dumps({"inputs": [f"{n}"], "outputs": [f"{n}"]})}),
            ("reasoning_gym", {}),
        )
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    found = tasks.load(TaskSection(sources=[SourceSection(path=str(tmp_path))], heldout=4))
    together = [*found.train, *found.heldout]
    assert sorted(task.reward for task in together) == ["code"] * 12 + ["math"] * 12
    assert all((task.reward == "code") == bool(task.tests) for task in together)
    assert "12 rows left out: task type reasoning_gym" in found.notes[0]

"""Schemas of public data sets: `schema_rows.jsonl` has rows with each set's columns, and the fields read from them."""

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
from shoal.tasks.sources import code_tests, schemas
from shoal.tasks.sources.rows import LeftOutError, RowError, TaskFields

Row = dict[str, Any]
CASES: list[Row] = list(map(json.loads, Path(__file__).with_name("schema_rows.jsonl").read_text("utf-8").splitlines()))
BY_SCHEMA: dict[str, Row] = {case["schema"]: case["row"] for case in reversed(CASES)}  # the first row of each schema
MATH, NUMINA, LIVE = (BY_SCHEMA[name] for name in ("MATH", "NuminaMath-1.5", "LiveCodeBench"))
GENESYS = next(case["row"] for case in CASES if case["row"].get("task_type") == "verifiable_code")


def read(row: Row) -> tuple[str, TaskFields]:
    schema = schemas.recognize(row)
    return schema.name, schema.read(row)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["schema"])
def test_a_row_gives_question_answer_tests_and_reward(case: Row) -> None:
    name, fields = read(case["row"])
    assert (name, fields.question, fields.reward) == (case["schema"], case["question"], case["reward"])
    assert fields.answer == case.get("answer", fields.answer)
    assert (json.loads(fields.tests) if fields.tests else None) == case.get("tests")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (NUMINA | {"question_type": "proof", "answer": "proof"}, "a proof"),
        (NUMINA | {"answer": "notfound"}, "no answer"),
        (NUMINA | {"problem_is_valid": "Incomplete"}, "problem_is_valid is not Yes"),
        (NUMINA | {"solution_is_valid": "Problem not solved"}, "solution_is_valid is not Yes"),
        (MATH | {"solution": "It is one half."}, "no boxed answer"),
        ({"question": "Untested.", "input_output": ""}, "no tests"),
        (GENESYS | {"task_type": "llm_judgeable_groundtruth_similarity", "verification_info": "{}"}, "task type llm_j"),
        (GENESYS | {"verification_info": '{"language": "rust", "test_cases": [{}]}'}, "code in rust"),
        ({"question": "Untested.", "tests": None}, "no tests"),
        (GENESYS | {"task_type": "verifiable_math", "verification_info": '{"ground_truth": " "}'}, "no answer"),
    ],
)
def test_rows_that_their_data_set_marks_as_unusable_are_left_out_with_a_reason(row: Row, reason: str) -> None:
    assert NUMINA["problem_is_valid"] == "Yes"
    with pytest.raises(LeftOutError, match=reason):
        read(row)


def b64(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("unpickled",))


@pytest.mark.parametrize(
    ("private", "message"),
    [
        (b64(pickle.dumps(Evil())), "a pickle that is not a single string; pickles are never loaded"),
        (b64(pickle.dumps(["[]", "[]"])), "a pickle that is not a single string"),
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


def test_an_argument_of_a_test_may_contain_any_line_separator() -> None:
    case = {"input": '"one\u2028two\x85three"\n4\n', "output": "true", "testtype": "functional"}
    [converted] = json.loads(code_tests.livecodebench([case], "solve"))["cases"]
    assert converted == {"args": ["one\u2028two\x85three", 4], "output": True}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (GENESYS | {"verification_info": "[" * 65_536}, "verification_info is not JSON"),
        ({"text": "?", "gold": "5"}, r'columns \(gold, text\) match no known schema: .* fields = \{ question = "gold"'),
        ({"input": "?", "target": "yes"}, r"columns \(input, target\) match no known schema"),
    ],
    ids=["deeply nested JSON", "unknown columns", "MAWPS without a number"],
)
def test_the_error_says_why_a_row_is_bad(row: Row, message: str) -> None:
    with pytest.raises(RowError, match=message):
        read(row)


def test_a_mixed_source_grades_each_row_by_its_own_kind(tmp_path: Path) -> None:
    rows = [
        {"task_type": kind, "prompt": f"{kind} {n}", "verification_info": json.dumps(info), "solve_rate": 0.5}
        for n in range(12)
        for kind, info in (
            ("verifiable_math", {"ground_truth": str(n)}),
            ("prime_rl_code", {"test_cases": json.dumps({"inputs": [f"{n}"], "outputs": [f"{n}"]})}),
            ("reasoning_gym", {}),
        )
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    loaded = tasks.load(TaskSection(sources=[SourceSection(path=str(tmp_path))], heldout=4))
    every = [*loaded.train, *loaded.heldout]
    assert sorted(task.reward for task in every) == ["code"] * 12 + ["math"] * 12
    assert all((task.reward == "code") == bool(task.tests) for task in every)
    assert "12 rows left out: task type reasoning_gym" in loaded.notes[0]

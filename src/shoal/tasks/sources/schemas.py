"""Schemas of public data sets, recognized by their columns. To add one, add a function and an entry in SCHEMAS.

Invariant: one schema reads all rows of a file. It is the first schema in SCHEMAS that fits: the file has its columns,
and its `when` accepts the file's first row. The columns are named as on the data sets' pages and in their loaders.
"""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.tasks.rewards.answers import braced, last_number
from shoal.tasks.sources import code_tests
from shoal.tasks.sources.rows import LeftOutError, Row, RowError, TaskFields, as_json, parsed, text, value


@dataclass(frozen=True)
class RowSchema:
    name: str
    needs: tuple[str, ...]  # the columns that identify it
    read: Callable[[Row], TaskFields]
    reads: tuple[str, ...] = ()  # optional columns
    when: Callable[[Row], bool] = lambda row: True  # tests the first row, if columns alone do not identify the schema


def gsm8k(row: Row) -> TaskFields:
    _, marker, answer = text(row, "answer").rpartition("####")
    number = last_number(answer)
    if not marker or number is None:
        raise RowError("column answer has no number after ####")
    return TaskFields(text(row, "question"), number, reward="number")


def svamp(row: Row) -> TaskFields:
    body = text(row, "Body").strip()
    end = "" if body.endswith((".", "?", "!", ",")) else "."
    return TaskFields(f"{body}{end} {text(row, 'Question').strip()}", text(row, "Answer"), reward="number")


def mawps(row: Row) -> TaskFields:
    return TaskFields(text(row, "input").strip(), text(row, "target"), reward="number")


# --- mathematics ----------------------------------------------------------------------------------------------------


def problem(row: Row) -> TaskFields:
    """Read a row of MATH-500, DeepScaleR, AIME and others with these columns."""
    answer = text(row, "answer").strip()
    if not answer:
        raise RowError("column answer is empty")
    return TaskFields(text(row, "problem"), answer, reward="math")


def competition_math(row: Row) -> TaskFields:
    answer = last_boxed(text(row, "solution"))
    if answer is None:
        raise LeftOutError("no boxed answer")
    return TaskFields(text(row, "problem"), answer, reward="math")


def numina_1_5(row: Row) -> TaskFields:
    for column in ("problem_is_valid", "solution_is_valid"):
        if row.get(column) not in (None, "Yes"):
            raise LeftOutError(f"{column} is not Yes")
    answer = str(row.get("answer") or "").strip()
    if row.get("question_type") == "proof" or answer.lower() in ("proof", "notfound", ""):
        raise LeftOutError("a proof, or no answer")
    return TaskFields(text(row, "problem"), answer, reward="math")


def last_boxed(solution: str) -> str | None:
    r"""Return the content of the last \boxed{}, including inner braces.

    >>> last_boxed(r"so \boxed{\frac{1}{2}} is it"), last_boxed(r"\boxed 5"), last_boxed("none")
    ('\\frac{1}{2}', '5', None)
    """
    boxes = list(re.finditer(r"\\(?:boxed|fbox)(?=[\s{])", solution))
    if not boxes:
        return None
    rest = solution[boxes[-1].end() :].lstrip()
    if rest.startswith("{"):
        return (braced(solution, boxes[-1].start()) or "").strip() or None
    return re.split(r"[\s$.,]", rest, maxsplit=1)[0] or None


# --- code -----------------------------------------------------------------------------------------------------------


def humaneval(row: Row) -> TaskFields:
    prompt = text(row, "prompt")
    return TaskFields(
        prompt,
        text(row, "canonical_solution"),
        tests=code_tests.asserts(text(row, "entry_point"), text(row, "test"), prompt),
        reward="code",
    )


def mbpp(row: Row) -> TaskFields:
    """Read a row of the full set (question in `text`) or of the sanitized set (question in `prompt`)."""
    code, lines = text(row, "code"), [str(line) for line in value(row, "test_list")]
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
    tests = "\n".join([*([setup] if setup else []), *lines])
    question = text(row, "text" if "text" in row else "prompt").strip()
    return TaskFields(
        f"{question}\nYour code should pass these tests:\n" + "\n".join(lines),
        code,
        tests=code_tests.asserts(code_tests.entry_of(code, tests), tests),
        reward="code",
    )


def apps(row: Row) -> TaskFields:
    starter = str(row.get("starter_code") or "")
    return TaskFields(
        _with_starter(text(row, "question"), starter),
        tests=code_tests.apps(row.get("input_output") or ""),
        reward="code",
    )


def livecodebench(row: Row) -> TaskFields:
    """Read all tests, public and private. The question shows none of the private tests."""
    public = parsed(value(row, "public_test_cases"), "public_test_cases")
    private = code_tests.unpack_livecodebench(str(row.get("private_test_cases") or "[]"))
    known = parsed(row.get("metadata") or "{}", "metadata")
    return TaskFields(
        _with_starter(text(row, "question_content"), str(row.get("starter_code") or "")),
        tests=code_tests.livecodebench([*public, *private], str(known.get("func_name") or "")),
        reward="code",
    )


def _with_starter(question: str, starter: str) -> str:
    return f"{question}\n\nStart from this code:\n```python\n{starter}\n```" if starter.strip() else question


# --- mixed ----------------------------------------------------------------------------------------------------------


def verification_info(row: Row) -> TaskFields:
    """Read a row of SYNTHETIC-1 and 2 or INTELLECT-2: `verification_info` holds the gold answer or the tests."""
    info, kind = _info(value(row, "verification_info")), str(row.get("task_type") or "")
    if kind in ("verifiable_math", "") and info.get("ground_truth") is not None:
        answer = text(info, "ground_truth").strip()
        if not answer:
            raise LeftOutError("no answer")
        return TaskFields(text(row, "prompt"), answer, reward="math")
    if kind in ("verifiable_code", "prime_rl_code", "") and info.get("test_cases") is not None:
        if str(info.get("language") or "python").lower() not in ("python", "python3"):
            raise LeftOutError(f"code in {info['language']}")
        cases = parsed(info["test_cases"], "verification_info.test_cases")
        tests = code_tests.genesys(cases) if isinstance(cases, list) else code_tests.apps(cases)
        return TaskFields(text(row, "prompt"), tests=tests, reward="code")
    if kind in ("verifiable_math", "verifiable_code", "prime_rl_code", ""):
        raise RowError("column verification_info has neither ground_truth nor test_cases")
    raise LeftOutError(f"task type {kind}")


def _info(info: Any) -> Row:
    """Return `info` as an object. Read text as JSON or as a Python literal. Raise RowError."""
    if isinstance(info, str):
        try:
            info = json.loads(info)
        except (ValueError, RecursionError):
            try:
                info = ast.literal_eval(info)
            except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
                raise RowError("column verification_info is not JSON") from error
    if not isinstance(info, dict):
        raise RowError("column verification_info is not an object")
    return info


# --- other ----------------------------------------------------------------------------------------------------------


def plain(row: Row) -> TaskFields:
    """Read `question`, and the optional `answer`, `tests` and `metadata`."""
    answer = text(row, "answer") if row.get("answer") is not None else ""
    tests, more = row.get("tests"), row.get("metadata")
    if "tests" in row and not tests and not answer:
        raise LeftOutError("no tests")
    return TaskFields(
        text(row, "question"),
        answer,
        tests=as_json(tests) if tests else "",
        metadata=as_json(more) if more else "",
        reward=default_reward(answer, has_tests=bool(tests)),
    )


def default_reward(answer: str, *, has_tests: bool) -> str:
    return "code" if has_tests else "number" if NUMERIC.fullmatch(answer.strip()) else ""


NUMERIC = re.compile(r"[-\u2212]?\$?[\d,]*\.?\d+", flags=re.ASCII)

SCHEMAS = [
    RowSchema("GSM8K", ("question", "answer"), gsm8k, when=lambda row: "####" in str(row["answer"])),
    RowSchema("SVAMP", ("Body", "Question", "Answer"), svamp),
    RowSchema("MAWPS", ("input", "target"), mawps, when=lambda row: isinstance(row["target"], int | float)),
    RowSchema("HumanEval", ("prompt", "canonical_solution", "test", "entry_point"), humaneval),
    RowSchema("MBPP", ("text", "code", "test_list"), mbpp, ("test_setup_code",)),
    RowSchema("MBPP (sanitized)", ("prompt", "code", "test_list"), mbpp, ("test_imports",)),
    RowSchema(
        "LiveCodeBench",
        ("question_content", "public_test_cases"),
        livecodebench,
        ("private_test_cases", "metadata", "starter_code"),
    ),
    RowSchema("APPS", ("question", "input_output"), apps, ("starter_code",)),
    RowSchema("SYNTHETIC-1 and INTELLECT-2", ("prompt", "verification_info"), verification_info, ("task_type",)),
    RowSchema(
        "NuminaMath-1.5", ("problem", "answer", "problem_is_valid", "solution_is_valid"), numina_1_5, ("question_type",)
    ),
    RowSchema("problem and answer", ("problem", "answer"), problem),
    RowSchema("MATH", ("problem", "solution"), competition_math),
    RowSchema("question and answer", ("question", "answer"), plain, ("tests", "metadata")),
    RowSchema("question and tests", ("question", "tests"), plain, ("metadata",)),
]


def recognize(first: Row) -> RowSchema:
    """Return the schema of a file with this first row. Raise RowError, which names the columns."""
    for schema in SCHEMAS:
        if first.keys() >= set(schema.needs) and schema.when(first):
            return schema
    raise RowError(
        f"its columns ({', '.join(sorted(first)) or 'none'}) match no known schema: name them in fields, "
        f'for example fields = {{ question = "{min(first, default="text")}", answer = "..." }}'
    )

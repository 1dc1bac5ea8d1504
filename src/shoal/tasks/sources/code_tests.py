"""Unit tests of code tasks as JSON: convert them from the formats of data sets, and parse them for the reward `code`.

    {"kind": "stdin", "cases": [{"input": str, "output": str}]}
    {"kind": "functional", "entry": "f", "cases": [{"args": [...], "output": ...}]}
    {"kind": "asserts", "entry": "f", "code": "def check(candidate): ..." or assert lines, "prompt": "code to continue"}

Invariants: nothing is executed or unpickled here. A pickled string is read as data, and any other pickle is refused.
Tests of any other shape raise a TestsError with the reason.
"""

import base64
import binascii
import json
import pickletools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import ShoalError
from shoal.tasks.sources.rows import LeftOutError, RowError, parsed

MAX_UNPACKED_BYTES = 64 << 20
STRINGS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
FRAMING = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}
DEFINED = re.compile(r"^def\s+(\w+)", flags=re.MULTILINE)


def stdin(cases: Sequence[tuple[Any, Any]]) -> str:
    return _dump({"kind": "stdin", "cases": [{"input": _lines(a), "output": _lines(b)} for a, b in cases]})


def functional(entry: str, cases: Sequence[tuple[Sequence[Any], Any]]) -> str:
    return _dump(
        {"kind": "functional", "entry": entry, "cases": [{"args": list(args), "output": out} for args, out in cases]}
    )


def asserts(entry: str, code: str, prompt: str = "") -> str:
    return _dump({"kind": "asserts", "entry": entry, "code": code, "prompt": prompt})


def apps(raw: Any) -> str:
    """Convert APPS's format, {"inputs": [...], "outputs": [...], "fn_name": optional}. Raise RowError, LeftOutError.

    If every expected output is a list of one value, expect that value, because APPS wraps each output in a list.
    """
    raw = parsed(raw, "input_output") if raw != "" else {}
    if not isinstance(raw, Mapping):
        raise RowError("the tests are not an object with inputs and outputs")
    inputs, outputs = raw.get("inputs") or [], raw.get("outputs") or []
    if not inputs:
        raise LeftOutError("no tests")
    if len(inputs) != len(outputs):
        raise RowError(f"the tests have {len(inputs)} inputs and {len(outputs)} outputs")
    if not raw.get("fn_name"):
        return stdin(list(zip(inputs, outputs, strict=True)))
    if all(isinstance(value, list) and len(value) == 1 for value in outputs):
        outputs = [value[0] for value in outputs]
    arguments = [value if isinstance(value, list) else [value] for value in inputs]
    return functional(str(raw["fn_name"]), list(zip(arguments, outputs, strict=True)))


def genesys(raw: Sequence[Any]) -> str:
    """Convert SYNTHETIC-1's format, a list of {"type", "input", "output", "fn_name"}. Raise RowError, LeftOutError."""
    cases = [case for case in raw if isinstance(case, Mapping)]
    if not cases:
        raise LeftOutError("no tests")
    if len(cases) != len(raw) or any("input" not in case or "output" not in case for case in cases):
        raise RowError("a test case is not an object with input and output")
    entries = {str(case["fn_name"]) for case in cases if case.get("fn_name")}
    if not entries:
        return stdin([(case["input"], case["output"]) for case in cases])
    if len(entries) > 1 or any(not isinstance(case["input"], list) for case in cases):
        raise RowError("the test cases call several functions, or have inputs that are not lists of arguments")
    return functional(entries.pop(), [(case["input"], case["output"]) for case in cases])


def livecodebench(cases: Sequence[Mapping[str, Any]], entry: str) -> str:
    """Convert LiveCodeBench's format. Each line of a functional case is an argument. Raise RowError, LeftOutError."""
    if not cases:
        raise LeftOutError("no tests")
    if all(case["testtype"] == "stdin" for case in cases):
        return stdin([(case["input"], case["output"]) for case in cases])
    if not entry:
        raise RowError("metadata has no func_name for its functional tests")

    def value(line: str) -> Any:
        return parsed(line, "a functional test case")

    def arguments(text: str) -> list[Any]:
        return [value(line) for line in text.split("\n") if line.strip()]  # a JSON string may contain U+2028

    return functional(entry, [(arguments(case["input"]), value(case["output"])) for case in cases])


def unpack_livecodebench(packed: str) -> list[Any]:
    """Decode private tests: JSON, or a JSON string that was pickled, compressed and encoded in base64. Raise RowError."""
    if packed.lstrip().startswith("["):
        return list(parsed(packed, "private_test_cases"))
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(packed, validate=True), MAX_UNPACKED_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise RowError(f"column private_test_cases is neither JSON nor compressed ({error})") from error
    if not inflate.eof:
        raise RowError(f"column private_test_cases unpacks to more than {MAX_UNPACKED_BYTES >> 20} MB: remove the row")
    return list(parsed(_pickled_string(data), "private_test_cases"))


def entry_of(code: str, tests: str) -> str:
    """Return the name of the last function that the solution defines and the tests call. Raise RowError."""
    called = [name for name in DEFINED.findall(code) if re.search(rf"\b{name}\s*\(", tests)]
    if not called:
        raise RowError("the tests call no function that the solution in column code defines")
    return str(called[-1])


def _pickled_string(data: bytes) -> str:
    """Return the string of a pickle that holds only one string. Its opcodes are read and never executed."""
    try:
        opcodes = list(pickletools.genops(data))
    except Exception as error:  # noqa: BLE001 - pickletools documents no error type for bytes that are no pickle
        raise RowError("column private_test_cases is not a pickled string") from error
    strings = [str(argument) for opcode, argument, _ in opcodes if opcode.name in STRINGS]
    if len(strings) != 1 or any(opcode.name not in STRINGS | FRAMING for opcode, _, _ in opcodes):
        raise RowError("column private_test_cases holds a pickle that is not a single string; pickles are never loaded")
    return strings[0]


def _lines(raw: Any) -> str:
    """Return the text of a stream, which some data sets store as a list of lines."""
    return "\n".join(map(str, raw)) if isinstance(raw, list) else str(raw)


def _dump(tests: dict[str, Any]) -> str:
    return json.dumps(tests, ensure_ascii=False)


# --- parse for the reward ---------------------------------------------------------------------------------------------


class TestsError(ShoalError):
    """The tests of a task cannot run."""

    __test__ = False  # keep pytest from collecting the class


@dataclass(frozen=True)
class Stdin:
    cases: list[tuple[str, str]]  # input, expected output


@dataclass(frozen=True)
class Functional:
    entry: str  # a function, or a method of a class `Solution`
    cases: list[tuple[list[Any], Any]]  # arguments, expected value
    prompt: str = ""


@dataclass(frozen=True)
class Asserts:
    entry: str
    code: str
    prompt: str = ""


Tests = Stdin | Functional | Asserts


def read_tests(text: str) -> Tests:
    """Parse the tests of a task. Raise TestsError."""
    if not text:
        raise TestsError('the task has no tests: name their column in the config, as in fields = { tests = "..." }')
    try:
        tests = json.loads(text)
        if not isinstance(tests, dict):
            raise TestsError(f'the task\'s tests are {text[:40]}, not an object with "kind": see docs/tasks.md, Fields')
        kind = tests["kind"]
        if kind in ("stdin", "functional") and not tests["cases"]:
            raise TestsError("the task's tests have no cases")
        if kind == "stdin":
            return Stdin([(_text(case["input"]), _text(case["output"])) for case in tests["cases"]])
        if kind == "functional":
            cases = [(list(case["args"]), case["output"]) for case in tests["cases"]]
            return Functional(_text(tests["entry"]), cases, _text(tests.get("prompt", "")))
        if kind == "asserts":
            return Asserts(_text(tests["entry"]), _text(tests["code"]), _text(tests.get("prompt", "")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TestsError(f"the task's tests cannot be read ({type(error).__name__}: {error})") from error
    raise TestsError(f"the task's tests are of kind {str(kind)[:40]!r}; known: stdin, functional, asserts")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of text")
    return value

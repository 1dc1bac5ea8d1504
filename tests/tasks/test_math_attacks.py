"""Attacks on the math reward: answers that equal everything, Python code, and endless computations."""

import time
from pathlib import Path

import pytest

from shoal.sandbox import PLAIN, RemoteFunction, Sandbox
from shoal.tasks.inside import source as text_of
from shoal.tasks.inside.equality import ForbiddenError, harmless, refuse
from shoal.tasks.rewards.math import Math
from shoal.tasks.task import Task


def score(reward: Math, gold: str, completion: str) -> float:
    return reward.grade([Task("t", "", gold)], [completion])[0].score


# --- answers that equal everything --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gold", ["x=5", "y=2x+1", "x>3", r"\{1,2\}", "(1,2,3)", r"\emptyset", r"\text{yes}", r"\frac{1}{2}", "[0,1)"]
)
def test_no_answer_equals_every_gold_answer(reward: Math, gold: str) -> None:
    answers = ["x=x", "0=0", "1=1", r"\mathbb{R}", r"\mathbb{C}", "x", r"\text{yes or no}", r"\infty", r"\frac{0}{0}"]
    for answer in (*answers, r"\{x\}", "0"):
        assert score(reward, gold, rf"\boxed{{{answer}}}") == 0, answer


# --- Python in an answer ----------------------------------------------------------------------------------------------


def injections(mark: Path) -> list[str]:
    code = f"__import__('pathlib').Path('{mark}').touch()"
    return [
        code, rf"\text{{{code}}}", rf"\operatorname{{{code}}}", rf"\mathrm{{{code}}}", f"1/({code})", f"5.__class__({code})",
        f"lambda: {code}", f"x_{{{code}}}", rf"\frac{{d}}{{d {code}}} x", f"exec(\"{code}\")", f"eval({code!r})",
        f"18; {code}", f"18\n{code}", rf"\sum_{{{code}}}^{{5}} 1", rf"\bar{{{code}}}", f"{{{code}}}", f"{code}\\%",
        rf"\begin{{matrix}}{code}\end{{matrix}}", rf"\variable{{{code}}}", rf"[[{code}]]", f"f({code})", f"`{code}`",
        f"1e{code}", f"0x{code}", f"\\{code}",
    ]  # fmt: skip


def test_neither_an_answer_nor_a_gold_answer_runs_as_python(reward: Math, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    completions = [
        form.format(code) for code in injections(mark) for form in (r"\boxed{{{}}}", "The answer is {}", "${}$", "{}")
    ]
    grades = reward.grade([Task("t", "", "18")] * len(completions), completions)
    assert not [grade for grade, text in zip(grades, completions, strict=True) if grade.score and "18" not in text]
    codes = injections(mark)
    reward.grade([Task("t", "", code) for code in codes], [r"\boxed{18}"] * len(codes))
    assert not mark.exists()


@pytest.mark.parametrize(
    "source",
    [
        "__import__('os')", "Integer.mro()", "Symbol('x').subs", "Integer(open)", "Symbol('x', **a)", "[Integer(1)]",
        "x", "a.b",
        "lambda: 1", "Float('1').__class__", "from os import *", "from sympy import *; import os",
        "def f(): return 1", "print(1)",
        "def monomial_mul(A, B): return A.b", "def monomial_mul(A, B): return open(A)",
    ],
)  # fmt: skip
def test_only_numbers_and_symbols_may_be_evaluated(source: str) -> None:
    assert not harmless(source)
    for given in (source, source.encode()):
        with pytest.raises(ForbiddenError):
            refuse("compile", (given, "<string>"))


@pytest.mark.parametrize(
    "source", ["Integer (18 )", "Float ('1.50' )", "Integer (1 )/Integer (2 )", "Symbol ('x' )", "from sympy import *"]
)
def test_code_that_the_library_needs_may_be_evaluated(source: str) -> None:
    refuse("compile", (source, "<string>"))


@pytest.mark.parametrize(
    "event", ["os.system", "os.fork", "subprocess.Popen", "socket.__new__", "ctypes.dlopen", "os.remove", "os.exec"]
)
def test_processes_sockets_and_files_are_refused(event: str) -> None:
    with pytest.raises(ForbiddenError):
        refuse(event, ("true",))
    with pytest.raises(ForbiddenError):
        refuse("open", ("/tmp/x", "w", 0))


def test_the_comparing_process_has_the_audit_hook() -> None:
    attack = "\ndef attack(code):\n    judge(['1/2', '0.5'])\n    return repr(eval(code))\n"
    with Sandbox(PLAIN, preloaded={"equality": text_of("equality") + attack}) as box:
        codes = ["__import__('os').getpid()", "open('/dev/null', 'w')", "(1).__class__"]
        calls = RemoteFunction(box, "import channel, equality; channel.serve(equality.attack)").calls(codes)
    assert [call.ending for call in calls] == ["raised"] * 3
    assert all("ForbiddenError" in call.detail for call in calls)


# --- time -------------------------------------------------------------------------------------------------------------

BOMBS = [
    "9^9^9^9", "9^{9^{9^{9}}}", "(9^{9^9})!", "9!!!!!!", r"10^{10^{100}}", r"\binom{10^9}{10^8}", "x" * 900, "{" * 5000,
    "(" * 3000 + "5" + ")" * 3000, r"\frac{1}{" * 500 + "1" + "}" * 500, r"\sum_{n=1}^{10^9} \frac{1}{n^n}", "\0" * 900,
    "2^" * 400 + "2", r"\gcd(10^{99999},7^{99999})", "(x+y+z+1)^{500}-1", r"\int_0^1 e^{x^{x^{x}}} dx", "1e999999999",
    "-" * 900 + "1", r"\sqrt{" * 29 + "x" + "}" * 29,
]  # fmt: skip


@pytest.mark.parametrize("answer", BOMBS)
def test_no_answer_exceeds_its_limit_or_breaks_the_pool(reward: Math, answer: str) -> None:
    start_s = time.process_time()
    assert score(reward, "18", rf"\boxed{{{answer}}}") == 0
    assert time.process_time() - start_s < 1, "the caller itself computed for too long"
    assert score(reward, "18", r"\boxed{\frac{36}{2}}") == 1

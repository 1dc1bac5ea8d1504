"""Programs that try to get a score without solving the task, in each tier: all get 0, and the next honest program gets 1."""

import json
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shoal.sandbox import TIERS, ProgramLimits, best_tier, problem
from shoal.tasks import Grade, Task
from shoal.tasks.rewards.code import Code

SECRET = "k9-" + secrets.token_hex(6)
SOLUTION = f"def solve(x):\n    return {{'a': {SECRET!r}, 'b': 7, 'c': 2.5, 'd': [1, 2]}}[x]\n"
EXPECTED = {"a": SECRET, "b": 7, "c": 2.5, "d": [1, 2]}

ASSERTS = "def check(candidate):\n" + "".join(f"    assert candidate({k!r}) == {v!r}\n" for k, v in EXPECTED.items())
TESTS = {
    "asserts": {"kind": "asserts", "entry": "solve", "code": ASSERTS},
    "functional": {
        "kind": "functional",
        "entry": "solve",
        "cases": [{"args": [key], "output": value} for key, value in EXPECTED.items()],
    },
}
STDIN = {"kind": "stdin", "cases": [{"input": "a\n", "output": SECRET}, {"input": "b\n", "output": "7"}]}
STDIN_SOLUTION = f"print({{'a': {SECRET!r}, 'b': 7}}[input()])"

# `scan` looks for the expected value in all that it can reach: frames, heap, memory, files, environment, stdin.
SCAN = r"""
import gc, glob, os, re, sys
PATTERN = re.compile(rb"k9-[0-9a-f]{12}")
def texts():
    frame = sys._getframe()
    while frame:
        yield repr(frame.f_locals).encode(errors="replace")
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, (dict, list, tuple)):
            try:
                yield repr(thing).encode(errors="replace")
            except Exception:
                pass
    for name in [*glob.glob("*"), *glob.glob("../*"), *glob.glob("/proc/*/cmdline"), *glob.glob("/proc/*/environ")]:
        try:
            yield open(name, "rb").read(1 << 20)
        except OSError:
            pass
    yield repr(dict(os.environ)).encode()
    try:
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
            for line in maps:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                if " rw" in line and end - start < 1 << 27:
                    memory.seek(start)
                    yield memory.read(end - start)
    except OSError:
        pass
    for number in (0, 3):
        os.set_blocking(number, False)
        try:
            yield os.read(number, 1 << 16)
        except OSError:
            pass
def scan():
    for text in texts():
        if match := PATTERN.search(text):
            return match[0].decode()
    return "nothing"
"""

FUNCTION = {
    "always equal": """
class Equal:
    __eq__ = __ge__ = __le__ = __contains__ = lambda *_: True
    __hash__ = lambda _: 0
def solve(x): return Equal()
""",
    "int that is always equal": """
class Equal(int):
    __eq__ = lambda *_: True
    __index__ = __int__ = lambda _: 7
    __hash__ = lambda _: 0
def solve(x): return Equal(0)
""",
    "str that is always equal": """
class Equal(str):
    __eq__ = lambda *_: True
    __ne__ = lambda *_: False
    __hash__ = lambda _: 0
def solve(x): return Equal("no")
""",
    "float and list that are always equal": """
class Equal(float):
    __eq__ = lambda *_: True
class Many(list):
    __eq__ = lambda *_: True
    __iter__ = lambda _: iter([1, 2])
    __len__ = lambda _: 2
def solve(x): return Equal(0) if x == "c" else Many([3])
""",
    "exits at once": "import os; os._exit(0)",
    "exits in a call": "import os\ndef solve(x): os._exit(0)",
    "sys.exit": "import sys\ndef solve(x): sys.exit(0)",
    "SystemExit at the top": "raise SystemExit(0)",
    "prints success": """
import os, sys
print("P"); print("All tests passed", flush=True)
os.write(1, b"1.0\\n"); os.write(2, b"OK\\n")
def solve(x): print("PASSED", flush=True); sys.exit(0)
""",
    "writes a verdict to the channel": """
import os, channel
channel.send(b"P"); os.write(4, b"\\0\\0\\0\\1P")
def solve(x): channel.send(b"P")
""",
    "answers before it is asked": """
import channel
channel.send(b"R")
for _ in range(50):
    channel.send(bytes(8) + b"T"); channel.send(bytes(8) + b"V" + b"T")
def solve(x): return x
""",
    "answers twice": """
import channel
real = channel.send
def solve(x):
    real(bytes(8) + b"T")
    return True
""",
    "patches the channel": """
import channel, sys
real = channel.send
channel.send = lambda frame: real(frame[:8] + b"P")
main = sys.modules["inside"]
main.pack = lambda value, depth=0: b"T"
main.answer = lambda function, call: b"VT"
def solve(x): return True
""",
    "patches comparison": """
import builtins, operator, math
builtins.all = builtins.any = builtins.isinstance = builtins.bool = lambda *_: True
operator.eq = math.isclose = lambda *_: True
builtins.AssertionError = type("Never", (Exception,), {})
def solve(x): return None
""",
    "patches the tests' files": """
import sys, types
for name in ("tests", "test", "check", "conftest", "candidate", "checker", "wire"):
    open(name + ".py", "w").write("def check(candidate): pass\\ndef main(): pass\\n")
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].check = lambda candidate: None
check = lambda candidate: None
def solve(x): return 0
""",
    "import hooks": """
import sys, importlib.abc
class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None): raise SystemExit(0)
sys.meta_path.insert(0, Hook()); sys.path_hooks.insert(0, lambda _: sys.exit(0)); sys.modules.clear()
def solve(x): return 0
""",
    "trace and profile hooks": """
import sys
def solve(x):
    sys.settrace(lambda frame, event, arg: None); sys.setprofile(lambda *_: None)
    frame = sys._getframe()
    while frame:
        for name in list(frame.f_locals):
            frame.f_globals[name] = True
        frame = frame.f_back
    return True
""",
    "reads what it can see": SCAN + "def solve(x): return scan() if x == 'a' else 0\n",
    "reads what it can see, at once": SCAN + "SECRET = scan()\ndef solve(x): return SECRET\n",
    "pickle bytes": """
import pickle
class Evil:
    def __reduce__(self): return (exec, ("open(MARK, 'w').write('x')",))
def solve(x): return pickle.dumps(Evil())
""",
    "an object that unpickles to code": """
class Evil:
    def __reduce__(self): return (exec, ("open(MARK, 'w').write('x')",))
def solve(x): return Evil()
""",
    "ten megabytes": "def solve(x): return 'x' * 10_000_000",
    "ten million items": "def solve(x): return [0] * 10_000_000",
    "a long int": "def solve(x): return 1 << 4_000_000",
    "a deep list": "def solve(x):\n    y = []\n    for _ in range(100_000): y = [y]\n    return y",
    "a list in itself": "def solve(x):\n    y = []\n    y.append(y)\n    return y",
    "a generator": "def solve(x): yield from [1, 2]",
    "a coroutine": "async def solve(x): return 7",
    "unreadable answers": """
import sys
sys.modules["inside"].answer = lambda function, call: b"V\\xff\\xff\\xff\\xff\\xff"
def solve(x): return 0
""",
    "unreadable exceptions": """
import sys
sys.modules["inside"].answer = lambda function, call: b"X" + sys.modules["inside"].pack({"a": [1]})
def solve(x): return 0
""",
    "raises in str": """
class Bad(Exception):
    def __str__(self): raise SystemExit
def solve(x): raise Bad
""",
    "raises AssertionError": "def solve(x): raise AssertionError",
    "raises SyntaxError": "def solve(x): raise SyntaxError('the tests')",
    "raises KeyboardInterrupt": "def solve(x): raise KeyboardInterrupt",
    "kills itself": "import os, signal\ndef solve(x): os.kill(os.getpid(), signal.SIGKILL)",
    "closes the channel": "import os\ndef solve(x):\n    os.close(4)\n    os.close(3)",
    "floods stdout": "def solve(x):\n    while True: print('x' * 100_000)",
    "floods the channel": "import os\ndef solve(x):\n    while True: os.write(4, b'\\0\\0\\0\\1P' * 10_000)",
    "a frame of 4 GB": "import os\ndef solve(x): os.write(4, b'\\xff\\xff\\xff\\xff')",
    "recursion": "def solve(x): return solve(x)",
    "a memory bomb": "def solve(x): return bytearray(1 << 40)",
}
SLOW = {
    "colliding keys": "def solve(x): return {n * ((1 << 61) - 1) for n in range(20_000)}",
    "sleeps": "import time\ndef solve(x): time.sleep(1e6)",
    "never reads": "import time\ntime.sleep(1e6)",
    "spins": "def solve(x):\n    while True: pass",
    "a fork bomb": "import os\ndef solve(x):\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "threads": """
import threading, time
def solve(x):
    while True:
        try: threading.Thread(target=time.sleep, args=(1e6,)).start()
        except RuntimeError: pass
""",
}


LIMITS = ProgramLimits(cpu_s=1.0, wall_s=2.0)


@pytest.fixture(scope="module", params=TIERS)
def code(request: pytest.FixtureRequest) -> Iterator[Code]:
    if reason := problem(request.param):
        pytest.skip(reason)
    with closing(Code(LIMITS, request.param, size=1)) as reward:
        yield reward


@pytest.fixture(scope="module")
def best() -> Iterator[Code]:
    with closing(Code(LIMITS, best_tier(), size=1)) as reward:
        yield reward


def grade(code: Code, tests: object, source: str) -> Grade:
    return code.grade([Task("t/1", "", "", tests=json.dumps(tests))], [f"```python\n{source}\n```"])[0]


def expect_no_score(code: Code, tests: object, attack: str, solution: str = SOLUTION) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)  # so that a program that escapes could write here
        mark = Path(folder) / "mark"
        result = grade(code, tests, attack.replace("MARK", repr(str(mark))))
        assert not mark.exists(), "a part of the attack was executed outside of the sandbox"
    assert (result.score, result.tier) == (0.0, code.candidates.tier)
    assert result.outcome != "grader_error", result.detail  # a program can fail, but not make the grader fail
    assert grade(code, tests, solution).score == 1.0


@pytest.mark.parametrize("attack", [*FUNCTION, *SLOW])
def test_an_attack_on_assertions_scores_0(code: Code, attack: str) -> None:
    expect_no_score(code, TESTS["asserts"], (FUNCTION | SLOW)[attack])


@pytest.mark.parametrize("attack", [*FUNCTION, "colliding keys"])
def test_an_attack_on_cases_scores_0(best: Code, attack: str) -> None:
    expect_no_score(best, TESTS["functional"], (FUNCTION | SLOW)[attack])


@pytest.mark.parametrize(
    "attack",
    [
        SCAN + "print(scan())",
        "import os; print('7'); os._exit(0)",
        "import sys; sys.exit(0)",
        "print('P', 'passed', 1.0)",
        "raise SystemExit(0)",
        "import os\nwhile True: os.write(1, b'7\\n' * 10_000)",
        "print('\\x00' * 10)",
    ],
)
def test_an_attack_on_stdin_cases_scores_0(code: Code, attack: str) -> None:
    expect_no_score(code, STDIN, attack, STDIN_SOLUTION)


def test_the_scan_finds_a_secret_that_is_present(code: Code) -> None:
    """Otherwise the attacks that use the scan would fail for another reason."""
    source = SCAN + "kept = []\ndef solve(x):\n    kept.append(x)\n    return scan()\n"
    tests = {"kind": "functional", "entry": "solve", "cases": [{"args": [SECRET], "output": SECRET}]}
    assert grade(code, tests, source).score == 1.0


def test_right_answers_before_a_call_do_not_count(code: Code) -> None:
    early = "import channel, sys\npack = sys.modules['inside'].pack\nchannel.send(b'R')\n" + "".join(
        f"channel.send(bytes(8) + b'V' + pack({value!r}))\n" for value in EXPECTED.values()
    )
    expect_no_score(code, TESTS["functional"], early + "while True: pass")


def test_a_stop_iteration_does_not_end_the_tests_early(code: Code) -> None:
    tests = {"kind": "asserts", "entry": "f", "code": "assert all(map(lambda x: candidate(x) == x + 1, range(3)))"}
    assert grade(code, tests, "def f(x): raise StopIteration").score == 0.0
    assert grade(code, tests, "def f(x): return x + 1").score == 1.0

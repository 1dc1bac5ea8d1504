"""verifiers environments as sources: scored by their own rewards, or refused by name.

The library may be installed in another Python: SHOAL_VERIFIERS_PYTHON=/path/bin/python pytest ...
"""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from shoal.config.tasks import SourceSection, TaskSection
from shoal.tasks import Graders, inside, libraries, load
from shoal.tasks.libraries import ENVIRONMENTS, PYTHON
from shoal.tasks.task import Task

from .test_adapters import graded

INTERPRETER = os.environ.get(PYTHON) or sys.executable
if subprocess.run([INTERPRETER, "-P", "-c", "import verifiers.v1"], capture_output=True).returncode:
    pytest.skip(
        "verifiers is not installed, nor named by SHOAL_VERIFIERS_PYTHON: pip install 'shoal[verifiers]'",
        allow_module_level=True,
    )

PARTS = {
    "head": "import verifiers.v1 as vf\n__all__ = ['Sums']",
    "data": "class Data(vf.TaskData):\n    answer: int",
    "task": "class Sum(vf.Task[Data]):",
    "reward": """
    @vf.reward
    async def correct(self, task, trace) -> float:
        return float(trace.last_reply.strip() == str(task.answer))""",
    "more": "",
    "config": "class Config(vf.TasksetConfig):\n    top: int = 6",
    "set": """
class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for a in range(self.config.top):
            for b in range(self.config.top):
                yield self.create(a, b)""",
    "create": """
    def create(self, a, b):
        return Sum(Data(prompt=f"{a} + {b}?", answer=a + b), self.config.task)""",
    "end": "",
}


@pytest.fixture(autouse=True)
def _path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(ENVIRONMENTS, "sums")


def written(folder: Path, name: str = "sums", **parts: str) -> Path:
    """Write an environment in which `parts` replace some of PARTS."""
    file = folder / f"{name}.py"
    file.write_text("\n".join((PARTS | parts).values()))
    return file


def rows(**options: Any) -> list[Task]:
    listed = libraries.rows("verifiers", {"environment": "sums"} | options)
    return [Task(id=f"sums/{n}", source="sums", **row) for n, row in enumerate(listed)]


def member(text: str) -> str:
    return textwrap.indent(textwrap.dedent(text), "    ")


def test_the_taskset_gives_the_tasks_and_its_rewards_give_the_scores(tmp_path: Path) -> None:
    written(
        tmp_path,
        more=member("""
            @vf.reward(weight=0.5)
            async def short(self, trace) -> float:
                return float(len(trace.last_reply) < 3)"""),
    )
    tasks = rows(config={"top": 3}, max_reward=1.5)
    assert [task.question for task in tasks[:4]] == ["0 + 0?", "0 + 1?", "0 + 2?", "1 + 0?"] and len(tasks) == 9
    assert [task.answer for task in tasks[:4]] == ["0", "1", "2", "1"]
    grades = graded("verifiers", [tasks[3]] * 3, ["1", "7", ""])
    assert [round(grade.score, 9) for grade in grades] == [1.0, round(0.5 / 1.5, 9), round(0.5 / 1.5, 9)]
    assert grades[0].parts == {"correct": 1.0, "short": 1.0}
    assert not any(grade.certain for grade in grades), "no grade may be certain, because a reward may use services"
    assert len(rows(size=5, max_reward=1.5)) == 5


def test_prompts_of_a_system_and_a_user_message_become_one_question(tmp_path: Path) -> None:
    written(
        tmp_path,
        create=member("""
            def create(self, a, b):
                messages = [vf.SystemMessage(content="Add."), vf.UserMessage(content=f"{a} + {b}?")]
                return Sum(Data(prompt=messages, answer=a + b), self.config.task)"""),
    )
    tasks = rows()
    assert tasks[1].question == "Add.\n\n0 + 1?"
    assert [grade.score for grade in graded("verifiers", tasks[1:2], ["1"])] == [1.0]


def test_a_config_with_a_verifiers_source_has_its_tasks_and_reward_and_an_edit_changes_the_digest(
    tmp_path: Path,
) -> None:
    file = written(tmp_path)
    section = TaskSection(sources=[SourceSection(generator="verifiers", options={"environment": "sums"})], heldout=8)
    tasks = load(section)
    with Graders(section) as graders:
        assert [grade.score for grade in graders.grade(tasks.heldout, [t.answer for t in tasks.heldout])] == [1.0] * 8
        file.write_text(file.read_text() + "\n# edited\n")
    assert load(section).digest != tasks.digest
    (grade,) = graded("verifiers", tasks.heldout[:1], [tasks.heldout[0].answer])
    assert grade.outcome == "grader_error" and "install the same" in grade.detail


REFUSED = {
    "sandbox": (
        {"more": member("@vf.reward\nasync def passes(self, trace, runtime) -> float:\n    return 1.0")},
        "more than a question and one reply: a sandbox",
    ),
    "container": ({"more": "    NEEDS_CONTAINER = True"}, ": a sandbox"),
    "setup": ({"more": "    async def setup(self, trace, runtime):\n        pass"}, ": a sandbox"),
    "image": ({"create": PARTS["create"].replace("answer=", "image='python:3', answer=")}, ": a sandbox"),
    "tools": (
        {
            "task": "class Calculator(vf.Toolset): pass\n" + PARTS["task"],
            "more": "    @classmethod\n    def toolsets(cls, config):\n        return [Calculator]",
        },
        ": tools",
    ),
    "stop": (
        {"more": member("@vf.stop\nasync def enough(self, trace) -> bool:\n    return True")},
        ": hooks between turns",
    ),
    "episode": (
        {
            "head": "import verifiers.v1 as vf\n__all__ = ['Sums', 'Debate']",
            "end": "class Debate(vf.Env[vf.EnvConfig]):\n    async def run(self, task, agents): pass",
        },
        ": episodes or a harness of its own",
    ),
    "several_messages": (
        {
            "create": PARTS["create"].replace(
                'prompt=f"{a} + {b}?"', 'prompt=[vf.UserMessage(content="Hi"), vf.AssistantMessage(content="Hi")]'
            )
        },
        "a prompt other than one user message",
    ),
    "no_prompt": (
        {"create": PARTS["create"].replace('prompt=f"{a} + {b}?", ', "")},
        "a prompt other than one user message",
    ),
    "no_reward": ({"reward": "    pass"}, ": a reward"),
    "more_than_data": (
        {
            "create": PARTS["create"].replace("return Sum(", "task = Sum(")
            + "\n        task.secret = 4\n        return task"
        },
        "state besides its data and config",
    ),
}


WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"environment": "no_such_one"}, "no_such_one does not load"),
    ({"environment": "json"}, "json does not load: taskset module 'json'"),
    ({"config": {"bottom": 3}}, "bottom"),
    ({"config": {"system_prompt": "/etc/hostname"}}, "names a file or a function on this machine"),
    ({"config": {"task": {"rewards": {"mine": {"fn": "os:getpid"}}}}}, "names a file or a function on this machine"),
    ({"python": "/bin/true"}, "no option python"),
]
# One process lists all environments, because importing the library takes seconds.
LIST_ALL = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("tasksets", sys.argv[1])
tasksets = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tasksets)
for options in json.load(sys.stdin):
    try:
        message = f"{len(list(tasksets.rows(options)))} tasks"
    except ValueError as error:
        message = str(error)
    print(json.dumps(message))
"""


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The messages for each environment in REFUSED, for the plain environment, and for each of WRONG_OPTIONS."""
    folder = tmp_path_factory.mktemp("environments")
    written(folder)
    for name, (parts, _) in REFUSED.items():
        written(folder, f"sums_{name}", **parts)
    requests = [{"environment": f"sums_{name}"} for name in REFUSED]
    requests += [{"environment": "sums"} | options for options in [{}, *(options for options, _ in WRONG_OPTIONS)]]
    done = subprocess.run(
        [INTERPRETER, "-P", "-c", LIST_ALL, str(Path(inside.__file__).with_name("tasksets.py"))],
        input=json.dumps(requests),
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", REFUSED)
def test_an_environment_that_needs_more_than_a_reply_is_refused(name: str, messages: list[str]) -> None:
    assert re.search(REFUSED[name][1], messages[list(REFUSED).index(name)])


@pytest.mark.parametrize("number", range(len(WRONG_OPTIONS)))
def test_the_error_names_wrong_options(number: int, messages: list[str]) -> None:
    assert messages[len(REFUSED)] == "36 tasks"
    assert re.search(WRONG_OPTIONS[number][1], messages[len(REFUSED) + 1 + number])


def test_a_reward_that_fails_is_a_grader_error(tmp_path: Path) -> None:
    written(
        tmp_path,
        reward=member("""
            @vf.reward
            async def correct(self, trace) -> float:
                match trace.last_reply:
                    case "raise": raise ValueError("no such answer")
                    case "much": return 3.0
                    case "nothing": return float("nan")
                return 1.0"""),
    )
    details = {"raise": "no such answer", "much": "max_reward", "nothing": "nan"}
    *failed, fine = graded("verifiers", rows(size=1) * (len(details) + 1), [*details, "fine"])
    assert {grade.outcome for grade in failed} == {"grader_error"} and fine.outcome == "graded"
    for grade, text in zip(failed, details.values(), strict=True):
        assert text in grade.detail


def test_metadata_is_json_with_versions(tmp_path: Path) -> None:
    written(tmp_path)
    metadata = json.loads(rows(size=1)[0].metadata)
    assert metadata["version"].startswith("verifiers 0.") and ", source " in metadata["version"]

"""`shoal grade` at a shell: a line for each completion, and what is wrong with a line that has none."""

import io
import json
from pathlib import Path

import pytest

from shoal import config, tasks
from shoal.cli.main import DONE, USAGE, main
from shoal.sandbox import best_tier
from shoal.tasks import Task

REWARD = "def exact(task, completion):\n    return completion == task.answer\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "my.jsonl").write_text(
        "".join(json.dumps({"text": f"{n} + {n}?", "gold": str(2 * n)}) + "\n" for n in range(40))
    )
    (tmp_path / "mine.py").write_text(REWARD)
    written = tmp_path / "my.toml"
    written.write_text(
        "[tasks]\nheldout = 8\n[evaluator]\nn = 8\n[[tasks.sources]]\n"
        f"path = {json.dumps(str(tmp_path / 'my.jsonl'))}\nfields = {{ question = 'text', answer = 'gold' }}\n"
        f"reward = {{ {json.dumps(str(tmp_path / 'mine.py') + ':exact')} = 1.0, number = 0.25 }}\n"
    )
    return written


def some(path: Path) -> list[Task]:
    """One task to train on and one held out."""
    task_set = tasks.load(config.load(path).tasks)
    return [task_set.train[0], task_set.heldout[0]]


def lines(*pairs: tuple[str, str]) -> str:
    return "".join(json.dumps({"task": task, "completion": completion}) + "\n" for task, completion in pairs)


def test_it_prints_a_line_for_each_completion(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, heldout = some(path)
    given = tmp_path / "completions.jsonl"
    given.write_text("\n" + lines((heldout.id, heldout.answer), (train.id, "It is " + train.answer), (train.id, "")))
    assert main(["grade", str(path), str(given)]) == DONE
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["task"], row["score"], row["outcome"]) for row in rows] == [
        (heldout.id, 1.0, "graded"),
        (train.id, 0.2, "graded"),
        (train.id, 0.0, "graded"),
    ]
    assert {row["tier"] for row in rows} == {best_tier()}
    assert "no number in the completion" in rows[2]["detail"]
    assert list(rows[1]["parts"].values()) == [0.0, 1.0]


def test_it_reads_stdin(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    [task, _] = some(path)
    monkeypatch.setattr("sys.stdin", io.StringIO(lines((task.id, task.answer))))
    assert main(["grade", str(path), "-", "--set", "tasks.sources.0.reward=number"]) == DONE
    row = json.loads(capsys.readouterr().out)
    assert row == {
        "task": task.id,
        "question": task.question,
        "answer": task.answer,
        "score": 1.0,
        "outcome": "graded",
        "tier": "",
        "detail": f"{task.answer}, expected {task.answer}",
    }


def test_a_task_may_be_named_by_its_question(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = tmp_path / "completions.jsonl"
    asked = [{"question": task.question, "completion": task.answer} for task in some(path)]
    given.write_text("".join(json.dumps(row) + "\n" for row in asked))
    assert main(["grade", str(path), str(given)]) == DONE
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["task"], row["score"]) for row in rows] == [(task.id, 1.0) for task in some(path)]
    given.write_text('{"question": "0 + 0", "completion": ""}')
    assert main(["grade", str(path), str(given)]) == USAGE
    assert "no question '0 + 0' in this config's sources" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ("[]", 'line 2 must be {"task": id or "question": text, "completion": text}'),
        ('{"task": "a"}', 'line 2 must be {"task": id or "question": text, "completion": text}'),
        ('{"task": "a", "completion": 1}', 'line 2 must be {"task": id or "question": text, "completion": text}'),
        (
            '{"task": "a/b", "completion": ""}',
            "line 2: no task 'a/b' in this config's sources; there is, for example, task my/",
        ),
    ],
)
def test_a_bad_line_is_named(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    given = tmp_path / "completions.jsonl"
    given.write_text(lines((some(path)[0].id, "4")) + line + "\n")
    assert main(["grade", str(path), str(given)]) == USAGE
    streams = capsys.readouterr()
    assert message in streams.err and streams.out == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "no reward file"),
        ("def exact(:", "not valid Python"),
        ("def other(task, completion): return 1", "has no function 'exact'"),
    ],
)
def test_a_reward_that_cannot_work_is_one_message(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str | None, message: str
) -> None:
    (tmp_path / "mine.py").unlink()
    if source is not None:
        (tmp_path / "mine.py").write_text(source)
    (tmp_path / "completions.jsonl").write_text("")
    assert main(["grade", str(path), str(tmp_path / "completions.jsonl")]) != DONE
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_a_file_that_is_not_there(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", str(path), "nowhere.jsonl"]) == USAGE
    assert "nowhere.jsonl cannot be read" in capsys.readouterr().err

"""GSM8K from files: what is trained on and held out, the digest all machines share, and the grade of an answer."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shoal import tasks
from shoal.config.recipe import TaskSection
from shoal.tasks import gsm8k
from shoal.tasks.gsm8k import TasksNotFoundError

DATA = Path(os.environ.get("SHOAL_DATA") or Path(__file__).parents[3] / "shared" / "data")


def rows(n: int, name: str) -> list[dict[str, str]]:
    return [
        {"question": f"{name} has {i} shells and finds 1,000. How many?", "answer": f"{i}+1000\n#### {1000 + i:,}"}
        for i in range(n)
    ]


def written(path: Path, lines: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written(tmp_path / "gsm8k_train.jsonl", rows(20, "Ann"))
    written(tmp_path / "gsm8k_test.jsonl", rows(6, "Bob"))
    return tmp_path


def section(path: Path | str, **more: Any) -> TaskSection:
    return TaskSection(kind="gsm8k", path=str(path), **({"heldout": 4} | more))


def digest(path: Path | str, **more: Any) -> str:
    found = tasks.load(section(path, **more))
    assert isinstance(found, gsm8k.Gsm8k)
    return found.digest


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_folder_holds_what_is_trained_on_and_what_is_held_out(folder: Path) -> None:
    found = tasks.load(section(folder))
    assert [task.question[:3] for task in found.train + found.heldout] == ["Ann"] * 20 + ["Bob"] * 6
    assert [task.answer for task in found.train[:2]] == ["1000", "1001"]


def test_a_question_of_both_files_is_only_held_out(folder: Path) -> None:
    written(folder / "gsm8k_train.jsonl", rows(20, "Ann") + rows(6, "Bob"))
    assert len(tasks.load(section(folder)).train) == 20


def test_a_single_file_is_split_by_its_text_whatever_the_order(tmp_path: Path) -> None:
    some = rows(30, "Ann")
    forth, back = (
        tasks.load(section(written(tmp_path / f"{name}.jsonl", lines)))
        for name, lines in (("a", some), ("b", some[::-1]))
    )
    assert (forth.train, forth.heldout) == (back.train, back.heldout)
    assert (len(forth.train), len(forth.heldout)) == (26, 4)
    assert not {task.question for task in forth.train} & {task.question for task in forth.heldout}


def test_line_separators_within_a_question_end_no_line(tmp_path: Path) -> None:
    lines = [{"question": f"{i}\u2028more", "answer": "#### 1"} for i in range(20)]
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    assert len(tasks.load(section(path)).train) == 16


def test_no_two_tasks_share_a_name(folder: Path) -> None:
    found = tasks.load(section(folder))
    assert len({task.id for task in found.train + found.heldout}) == 26


# --- the same tasks on every machine ----------------------------------------------------------------------------------


def test_the_digest_is_of_the_tasks_not_of_the_file(folder: Path) -> None:
    before = digest(folder)
    spaced = [json.dumps(line, indent=None, separators=(" ,", " : ")) + "\n\n" for line in rows(20, "Ann")]
    (folder / "gsm8k_train.jsonl").write_text("".join(spaced))
    assert digest(folder) == before


@pytest.mark.parametrize("name", ["gsm8k_train.jsonl", "gsm8k_test.jsonl"])
def test_other_tasks_or_another_order_change_the_digest(folder: Path, name: str) -> None:
    before = digest(folder)
    lines = (folder / name).read_text().splitlines(keepends=True)
    (folder / name).write_text("".join([*lines[2:], *lines[:2]]))
    moved = digest(folder)
    (folder / name).write_text("".join(lines[:-1]))
    assert len({before, moved, digest(folder)}) == 3


def test_a_given_digest_must_be_that_of_the_tasks(folder: Path) -> None:
    right = digest(folder)
    assert digest(folder, sha256=right) == right
    with pytest.raises(TasksNotFoundError, match=f"gives {right}: use the same files on every machine"):
        tasks.load(section(folder, sha256="0" * 64))


# --- what cannot be read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "?"}', r"row 1 is not a task: a question and an answer are expected"),
        ('["question"]', r"row 1 is not a task"),
        ('{"question": "?", "answer": "5"}', r"row 1 has no number after ####"),
        ('{"question": "?", "answer": "5 ####"}', r"row 1 has no number after ####"),
        ("{", r"not readable as JSON lines .*; set tasks.path"),
        ('{"question": "?", "answer": "#### 5"}', r"0 tasks to train on and 1 held out; 16 and tasks.heldout = 4"),
    ],
)
def test_a_bad_file_is_refused_and_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(TasksNotFoundError, match=message) as raised:
        tasks.load(section(path))
    assert str(path) in str(raised.value)


def test_a_missing_file_is_named_with_what_to_set_instead(tmp_path: Path) -> None:
    with pytest.raises(TasksNotFoundError, match=r"gsm8k_train.jsonl is not readable .*; set tasks.path"):
        tasks.load(section(tmp_path))


def test_without_a_path_the_hub_is_asked_and_what_it_holds_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    import pyarrow
    from pyarrow import parquet

    for name, lines in (("train", rows(20, "Ann")), ("test", rows(6, "Bob"))):
        parquet.write_table(pyarrow.Table.from_pylist(lines), tmp_path / f"{name}.parquet")

    def download(repository: str, name: str, repo_type: str) -> str:
        assert (repository, repo_type) == ("openai/gsm8k", "dataset")
        return str(tmp_path / ("train.parquet" if "train" in name else "test.parquet"))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert digest("") == digest(folder)


def test_an_unreachable_hub_is_said_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("no connection\nat length")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(TasksNotFoundError, match=r"\(no connection\); set tasks.path to a folder"):
        tasks.load(TaskSection(kind="gsm8k"))


# --- grades -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "answer", "grade"),
    [
        ("70000", "So he made $70,000.", 1),
        ("70000", "70000", 1),
        ("70000", "#### 70,000", 1),
        ("70000", "70,000.00 dollars", 1),
        ("70000", r"\boxed{\$70{,}000}", 1),
        ("70000", r"\boxed{70000} in 2 years", 1),  # the box counts
        ("70000", r"\boxed{2}, no, \boxed{70000}", 1),  # the last one
        ("70000", r"\boxed{x} or 70000", 1),  # a box without a number does not
        ("70000", "70,0000", 0),
        ("70000", "70 000", 0),
        ("70000", "70000 or 5", 0),  # the last number counts
        ("18", "eighteen", 0),
        ("18", "", 0),
        ("18", "\u0661\u0668", 0),  # digits of another script
        ("18", "9" * 10_000, 0),  # longer than int() reads
        ("18", "18.0000000000000000000000000001", 0),  # exactly, not as floats
        ("18", "16+2=18", 1),
        ("3", "8-5=3", 1),
        ("5", "8-5", 1),  # no operand is a sign
        ("-5", "a loss of -5", 1),
        ("-5", "-$5", 1),
        ("-5", "\u22125", 1),
        ("5", ".5", 0),
        ("0.5", ".50", 1),
        ("0", "-0.0", 1),
        ("5", "1, 2, 5,", 1),
    ],
)
def test_the_last_number_is_the_answer(folder: Path, expected: str, answer: str, grade: float) -> None:
    assert tasks.load(section(folder)).grade(tasks.Task("", "", expected), answer) == grade


def test_the_real_files_are_read_whole() -> None:
    if not (DATA / "gsm8k_train.jsonl").exists():
        pytest.skip(f"no gsm8k_train.jsonl in {DATA}; name its folder in SHOAL_DATA")
    found = tasks.load(section(DATA, heldout=1319))
    assert (len(found.train), len(found.heldout)) == (7473, 1319)
    assert found.heldout[2].answer == "70000"
    assert all(found.grade(task, f"It is ${task.answer}.") == 1 for task in found.train)

"""Sources from files, folders, the hub and generators: which rows become tasks, and the message for each unusable source."""

import gzip
import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from shoal import tasks
from shoal.config import ConfigError, load, parse
from shoal.config.tasks import SourceSection, TaskSection
from shoal.tasks.sources.generators import functions
from shoal.tasks.sources.reading import of_split
from shoal.tasks.task import TasksNotFoundError

DATA = Path(os.environ.get("SHOAL_DATA") or Path(__file__).parents[3] / "shared" / "data")
Row = dict[str, Any]


def rows(n: int, name: str) -> list[Row]:
    return [
        {"question": f"{name} has {i} shells and finds 1,000. How many?", "answer": f"{i}+1000\n#### {1000 + i:,}"}
        for i in range(n)
    ]


def written(path: Path, lines: list[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written(tmp_path / "set" / "gsm8k_train.jsonl", rows(20, "Ann"))
    written(tmp_path / "set" / "gsm8k_test.jsonl", rows(6, "Bob"))
    return tmp_path / "set"


def section(path: Path | str, heldout: int = 4, **more: Any) -> TaskSection:
    return TaskSection(sources=[SourceSection(path=str(path), **more)], heldout=heldout)


def apart(path: Path | str, **more: Any) -> TaskSection:
    return section(path, **({"heldout_split": "test"} | more))


def names(loaded: tasks.TaskSet) -> list[str]:
    return sorted({task.question[:3] for task in loaded.train}) + sorted({task.question[:3] for task in loaded.heldout})


# --- files and splits -------------------------------------------------------------------------------------------------


def test_a_folder_has_training_and_heldout_files(folder: Path) -> None:
    loaded = tasks.load(apart(folder))
    assert (len(loaded.train), len(loaded.heldout), names(loaded)) == (20, 4, ["Ann", "Bob"])
    assert sorted(int(task.answer) for task in loaded.train) == list(range(1000, 1020))


def test_a_question_in_both_files_is_held_out_and_dropped_from_training(folder: Path) -> None:
    doubled = [{**row, "question": f"  {row['question']}\n"} for row in rows(6, "Bob")]  # equal except for white space
    written(folder / "gsm8k_train.jsonl", rows(20, "Ann") + doubled)
    loaded = tasks.load(apart(folder, heldout=6))
    assert len(loaded.train) == 20
    assert "6 training rows dropped because their question is held out" in loaded.notes[0]


def test_equal_rows_are_merged_to_one_task_and_counted(folder: Path) -> None:
    written(folder / "gsm8k_train.jsonl", rows(20, "Ann") + rows(3, "Ann"))
    loaded = tasks.load(apart(folder))
    assert len(loaded.train) == len({task.id for task in loaded.train}) == 20
    assert "; 3 equal rows merged" in loaded.notes[0]


def test_a_question_with_two_answers_is_two_tasks_on_one_side_of_the_split(tmp_path: Path) -> None:
    lines = [row | {"answer": f"#### {n}"} for row in rows(20, "Ann") for n in (1, 2)]
    loaded = tasks.load(section(written(tmp_path / "some.jsonl", lines), heldout=5))
    assert not {task.question for task in loaded.train} & {task.question for task in loaded.heldout}
    assert len(loaded.heldout) == 5 and len(loaded.train) == 34, (
        "the other task with the fifth held-out question must be dropped"
    )


def test_the_split_of_a_single_file_does_not_depend_on_the_order_of_its_rows(tmp_path: Path) -> None:
    some = rows(30, "Ann")
    forth = tasks.load(section(written(tmp_path / "a" / "some.jsonl", some)))
    back = tasks.load(section(written(tmp_path / "b" / "some.jsonl", some[::-1])))
    assert (list(forth.train), list(forth.heldout), forth.digest) == (list(back.train), list(back.heldout), back.digest)
    assert (len(forth.train), len(forth.heldout)) == (26, 4)
    assert not {task.question for task in forth.train} & {task.question for task in forth.heldout}


def test_gzip_parquet_and_a_byte_order_mark_give_the_rows_of_json_lines(tmp_path: Path) -> None:
    lines = [{"question": f"{i}\u2028more", "answer": "#### 1"} for i in range(20)]  # U+2028 does not end a line
    data = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode()
    (tmp_path / "plain.jsonl").write_bytes(data)
    (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf" + data)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(data))
    parquet.write_table(pyarrow.Table.from_pylist(lines), tmp_path / "columns.parquet")
    sets = [tasks.load(section(path, name="one")) for path in tmp_path.iterdir()]
    assert [len(loaded.train) for loaded in sets] == [16] * 4 and len({loaded.digest for loaded in sets}) == 1


@pytest.mark.parametrize(
    ("files", "split", "chosen"),
    [
        (["gsm8k_train.jsonl", "gsm8k_test.jsonl"], "test", ["gsm8k_test.jsonl"]),
        (["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"], "train", None),
        (["train/0000.parquet", "test/0000.parquet"], "train", ["train/0000.parquet"]),
        (["b.jsonl", "a.jsonl"], "train", ["a.jsonl", "b.jsonl"]),  # no file names a split
        (["level-hard.jsonl", "train.jsonl"], "hard", ["level-hard.jsonl"]),  # any word may be a split
        (["contest.jsonl", "test.jsonl"], "test", ["test.jsonl"]),  # only whole words count
    ],
)
def test_a_file_belongs_to_the_split_that_is_a_word_of_its_path(
    files: list[str], split: str, chosen: list[str] | None
) -> None:
    assert of_split(files, split, "set") == (files if chosen is None else chosen)


def test_fields_name_plain_and_nested_columns_and_columns_in_json(tmp_path: Path) -> None:
    lines = [{"text": f"Say {n}.", "info": {"gold": n}, "more": json.dumps({"level": [n]})} for n in range(20)]
    path = written(tmp_path / "some.jsonl", lines)
    fields = {"question": "text", "answer": "info.gold", "metadata": "more.level"}
    loaded = tasks.load(section(path, fields=fields))
    task = min(loaded.train, key=lambda task: int(task.answer))
    assert task.question == f"Say {task.answer}." and json.loads(task.metadata) == [int(task.answer)]
    assert task.reward == "number"


def test_a_weighted_mixture_reads_each_source_by_its_own_schema(folder: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "own.jsonl", [{"problem": f"P{n}", "answer": f"{n}"} for n in range(30)])
    sources = [SourceSection(path=str(folder / "gsm8k_train.jsonl")), SourceSection(path=str(path), weight=3)]
    loaded = tasks.load(TaskSection(sources=sources, heldout=4))
    assert {(task.source, task.reward) for task in loaded.train} == {("gsm8k_train", "number"), ("own", "math")}
    assert sorted(task.source for task in loaded.heldout) == ["gsm8k_train", "own", "own", "own"]


def test_a_question_held_out_in_one_source_is_not_trained_on_in_another(folder: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "own.jsonl", rows(20, "Cid") + rows(6, "Bob"))
    sources = [SourceSection(path=str(folder), heldout_split="test"), SourceSection(path=str(path), weight=1e-9)]
    loaded = tasks.load(TaskSection(sources=sources, heldout=6))
    assert names(loaded) == ["Ann", "Cid", "Bob"]


# --- what cannot be read ----------------------------------------------------------------------------------------------

GOOD = '{"question": "?", "answer": "#### 5"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"question": "?"}', r"row 1: its columns \(question\) match no known schema: .* fields = "),
        (b'["question"]', r"row 1 is not an object with columns"),
        (GOOD.encode() + b"7", r"row 2 is not an object"),
        (GOOD.encode() + b'{"question": "?", "answer": "5"}', r"row 2: column answer has no number after ####"),
        (GOOD.encode() + b'\n\n{"question": "?"}', r"row 4: no column answer: there are question"),
        (GOOD.encode() + b'{"question": null, "answer": "#### 5"}', r"row 2: column question is empty"),
        (GOOD.encode() + b'{"question": " \\n", "answer": "#### 5"}', r"row 2: the question is empty; remove the row"),
        (GOOD.encode() + b'{"question": ["?"], "answer": "#### 5"}', r"row 2: column question holds a list, not text"),
        (GOOD.encode() + b'{"question": "\\ud800", "answer": "#### 5"}', r"row 2: question holds half a surrogate"),
        (b"{", r"row 1 is not readable as JSON \(.*\); a row is one object on one line: correct or remove it"),
        (b'[\n {"question": "?", "answer": "#### 5"}\n]', r"row 1 is not readable as JSON .* one object on one line"),
        (GOOD.encode("utf-16"), r"row 1 is not UTF-8 \(byte 0xff at 0\); convert the file with iconv"),
        (b"[" * 100_000, r"row 1 is not readable as JSON"),
        (GOOD.encode() + b'{"question": "caf\xe9"}', r"row 2 is not UTF-8 \(byte 0xe9 at 17\)"),
        (b"", r"holds no rows"),
        (b"\n \n", r"holds no rows"),
        (GOOD.encode(), r"0 tasks to train on and 1 held out; 16 and 4 are needed: lower tasks.heldout or add tasks"),
        (b'{"question": "Capital?", "answer": "Paris"}', r"'Paris' is not a number; name the source's reward"),
        (
            GOOD.encode() + json.dumps({"question": "?" * 10_000_000, "answer": "#### 5"}).encode(),
            r"row 2: question has 10.0 MB, more than 1.0 MB",
        ),
    ],
)
def test_the_error_names_a_file_that_cannot_be_used(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(content)
    with pytest.raises(TasksNotFoundError, match=message) as raised:
        tasks.load(section(path))
    assert str(path) in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"split": "tset"}, r"no split 'tset'; there are test, train: set split or heldout_split"),
        ({"heldout_split": "validation"}, r"no split 'validation'; there are test, train"),
        ({"fields": {"question": "text"}}, r"row 1: no column text: there are question, answer; correct `fields`"),
        ({"fields": {"qestion": "text"}}, r"row 1: `fields` has no key 'qestion'; its keys are question, answer"),
        ({"fields": {"question": "question.text"}}, r"row 1: column question.text is not JSON"),
        ({"reward": "mine.py:exact"}, r"no reward file at mine.py \(current folder: .*; correct the source's reward"),
        (
            {"environment": "mine.py:Echo"},
            r"no environment file at mine.py \(current .*; correct the source's environment",
        ),
        ({"keep": "kept.json"}, r"keep = 'kept.json' is not a manifest of `shoal filter`"),
    ],
)
def test_the_error_names_a_wrong_setting(folder: Path, more: Row, message: str) -> None:
    with pytest.raises(TasksNotFoundError, match=message):
        tasks.load(section(folder, **more))


@pytest.mark.parametrize(
    ("reward", "row", "message"),
    [
        ("number", {}, "the reward 'number' cannot grade this row: its answer '' has no number"),
        ("number", {"answer": "seven"}, "the reward 'number' cannot grade this row: its answer 'seven' has no number"),
        ("math", {"answer": " "}, "the reward 'math' cannot grade this row: it has no answer"),
        ({"math": 1.0, "mine.py:brief": 0.1}, {}, "the reward 'math' cannot grade this row: it has no answer"),
        ("code", {}, "the reward 'code' cannot grade this row: the task has no tests"),
        ("code", {"tests": '"garbage"'}, "the reward 'code' cannot grade this row: the task's tests "),
        ("", {"answer": ""}, "the row has no answer; name the source's reward"),
    ],
)
def test_every_row_must_have_what_its_reward_needs(tmp_path: Path, reward: Any, row: Row, message: str) -> None:
    path = written(tmp_path / "some.jsonl", [{"question": f"{number}?"} | row for number in range(30)])
    fields = {"question": "question"} | {name: name for name in row}
    with pytest.raises(TasksNotFoundError, match=f"row 1: {message}"):
        tasks.load(section(path, reward=reward, fields=fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"answer": "info.gold"}, r"row 1: column info.gold is not JSON \("),
        ({"metadata": "info"}, r"row 1: a column holds JSON that is nested too deep; flatten it"),
        ({"tests": "info"}, r"row 1: a column holds JSON that is nested too deep; flatten it"),
    ],
)
def test_the_error_names_columns_of_deeply_nested_json(tmp_path: Path, fields: dict[str, str], message: str) -> None:
    path = written(tmp_path / "some.jsonl", [{"question": "?", "answer": "5", "info": "[" * 65_536}])
    with pytest.raises(TasksNotFoundError, match=message):
        tasks.load(section(path, fields={"question": "question", **fields}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("some.parquet", b"PAR1 no", r"some.parquet, after row 0, is not readable as Parquet .*; copy or download"),
        ("some.jsonl.gz", b"no gzip", r"is not a complete gzip file .*; copy or download it again"),
        ("some.jsonl.gz", gzip.compress(GOOD.encode() * 9, mtime=0)[:-9], r"is not a complete gzip file"),
        ("some.csv", b"question,answer\n", r"some.csv ends in none of .jsonl, .jsonl.gz, .parquet; convert it"),
    ],
)
def test_the_error_names_a_damaged_file_or_one_of_unknown_format(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TasksNotFoundError, match=message):
        tasks.load(section(tmp_path / name))


@pytest.mark.parametrize(
    ("path", "more", "message"),
    [
        ("nowhere.jsonl", {}, r"no file or folder at .*nowhere.jsonl, neither in"),
        ("empty", {}, r"empty holds no .jsonl, .jsonl.gz, .parquet file"),
        ("set/gsm8k_train.jsonl", {"heldout_split": "test"}, r"is one file, without a split 'test'"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_the_error_names_a_missing_file_or_split(tmp_path: Path, path: str, more: Row, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(TasksNotFoundError, match=message):
        tasks.load(section(tmp_path / path, **more))


def test_files_may_be_beside_the_config_and_the_current_folder_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "own" / "my.jsonl", rows(20, "Ann"))
    code = {
        "mine.py": b"def exact(task, completion): return 1.0\n",
        "mine_env.py": b"class Echo:\n    def respond(self, task, seed, turns): return turns[-1]\n",
    }
    for name, text in code.items():
        (tmp_path / "own" / name).write_bytes(text)
    config = tmp_path / "own" / "my.toml"
    config.write_text(
        '[tasks]\nheldout = 4\n[evaluator]\nn = 4\n[[tasks.sources]]\npath = "my.jsonl"\n'
        'reward = { "mine.py:exact" = 1.0, "number" = 0.5 }\nenvironment = "mine_env.py:Echo"\n'
    )
    loaded = load(config)
    assert loaded.tasks.sources[0].path == str(tmp_path / "own" / "my.jsonl")
    assert loaded.tasks.sources[0].environment == f"{tmp_path / 'own' / 'mine_env.py'}:Echo"
    assert tasks.load(loaded.tasks).files == code
    written(tmp_path / "my.jsonl", rows(20, "Bob"))
    assert load(config).tasks.sources[0].path == "my.jsonl"


# --- the hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A fake hub with one data set of two configs; `revisions` collects the requested revisions."""
    import huggingface_hub

    files = {}
    for config in ("main", "socratic"):
        for split, lines in (("train", rows(20, "Ann")), ("test", rows(6, "Bob"))):
            path = written(tmp_path / "hub" / config / f"{split}-00000-of-00001.parquet", [])
            parquet.write_table(pyarrow.Table.from_pylist(lines), path)
            files[f"{config}/{path.name}"] = path
    fake: dict[str, Any] = {"files": files, "revisions": set()}

    def listed(self: Any, repository: str, *, repo_type: str, revision: str | None) -> list[str]:
        assert (repository, repo_type) == ("openai/gsm8k", "dataset")
        fake["revisions"].add(revision)
        return [*files, "README.md"]

    def download(repository: str, name: str, *, repo_type: str, revision: str | None) -> str:
        assert (repository, repo_type) == ("openai/gsm8k", "dataset")
        fake["revisions"].add(revision)
        return str(files[name])

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", listed)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return fake


def from_hub(name: str, **more: Any) -> TaskSection:
    source = SourceSection(hub=name, **({"heldout_split": "test", "name": "one"} | more))
    return TaskSection(sources=[source], heldout=4)


def test_a_data_set_of_the_hub_is_read_by_config_split_and_revision(hub: dict[str, Any], folder: Path) -> None:
    loaded = tasks.load(from_hub("openai/gsm8k/main", revision="v1"))
    assert loaded.digest == tasks.load(apart(folder, name="one")).digest
    assert hub["revisions"] == {"v1"}
    assert SourceSection(hub="openai/gsm8k/main").label == "gsm8k-main"


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("openai/gsm8k", {}, r'several configs: write hub = "openai/gsm8k/CONFIG" with one of main, socratic'),
        ("openai/gsm8k/platonic", {}, r"no file of config 'platonic'; there are main/test-0"),
        ("openai/gsm8k/main", {"heldout_split": "dev"}, r"no split 'dev'; there are test, train"),
    ],
)
def test_the_error_names_a_config_split_or_file_that_the_hub_lacks(
    hub: dict[str, Any], name: str, more: Row, message: str
) -> None:
    with pytest.raises(TasksNotFoundError, match=message):
        tasks.load(from_hub(name, **more))
    hub["files"].clear()
    with pytest.raises(TasksNotFoundError, match=r'; set revision = "refs/convert/parquet", where'):
        tasks.load(from_hub("openai/gsm8k"))


@pytest.mark.parametrize("kind", ["ConnectError", "OSError"])
def test_an_unreachable_hub_is_an_error_with_instructions_for_offline_use(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    its_http = importlib.import_module(type(huggingface_hub.get_session()).__module__.partition(".")[0])
    error = OSError if kind == "OSError" else getattr(its_http, kind)

    def listed(*_: Any, **__: Any) -> list[str]:
        raise error("no connection\nat length")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", listed)
    message = r"\(no connection\); without .*hf download openai/gsm8k .* path = .FOLDER/main"
    with pytest.raises(TasksNotFoundError, match=message):
        tasks.load(from_hub("openai/gsm8k/main"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"hub": "gsm8k"}, "write org/name, or org/name/config"),
        ({"path": "x.jsonl", "revision": "main"}, "revision applies only to hub"),
        ({"path": "x.jsonl", "hub": "a/b"}, "a source needs exactly one of path, hub and generator"),
    ],
)
def test_a_source_that_contradicts_itself_is_refused_by_the_config(source: Row, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse({"tasks": {"sources": [source]}})


# --- the real files ---------------------------------------------------------------------------------------------------


def real(name: str) -> Path:
    if not (DATA / name).exists():
        pytest.skip(f"no {name} in {DATA}; name its folder in SHOAL_DATA")
    return DATA / name


def test_the_real_gsm8k_is_read_whole(tmp_path: Path) -> None:
    for name in ("gsm8k_train.jsonl", "gsm8k_test.jsonl"):
        (tmp_path / name).symlink_to(real(name))
    loaded = tasks.load(apart(tmp_path, heldout=1319, name="gsm8k"))
    assert (len(loaded.train), len(loaded.heldout)) == (7473, 1319)
    assert loaded.notes == ["gsm8k (GSM8K): 7,473 tasks to train on, 1,319 held out"]
    assert "70000" in {task.answer for task in loaded.heldout if "flipping a house" in task.question}
    with tasks.Graders(apart(tmp_path, name="gsm8k")) as graders:
        every = list(loaded.heldout)
        assert all(grade.score == 1 for grade in graders.grade(every, [f"It is ${task.answer}." for task in every]))


def test_the_real_humaneval_is_read_whole() -> None:
    loaded = tasks.load(section(real("HumanEval.jsonl.gz"), heldout=64))
    assert "(HumanEval)" in loaded.notes[0] and len(loaded.train) + len(loaded.heldout) == 164


# --- the generator `functions` ----------------------------------------------------------------------------------------


def test_each_kind_and_constant_gives_one_task_that_no_constant_function_passes() -> None:
    rows = functions({})
    assert len({row["question"] for row in rows}) == len(rows) > 300
    for row in rows:
        outputs = [json.dumps(case["output"]) for case in json.loads(row["tests"])["cases"]]
        assert len(set(outputs)) > 1, row["question"]
    with pytest.raises(TasksNotFoundError, match="generator functions has no option kind"):
        functions({"kind": "add"})


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("returns x plus 3", {"args": [0], "output": 3}),
        ("returns the numbers in the list x that are greater than 3", {"args": [[4, 9, 2]], "output": [4, 9]}),
        ("returns the last 3 characters of the string x", {"args": ["shoal"], "output": "oal"}),
    ],
)
def test_the_tests_of_a_generated_function_match_its_text(text: str, first: object) -> None:
    [row] = [row for row in functions({}) if row["question"] == f"Write a Python function f(x) that {text}."]
    tests = json.loads(row["tests"])
    assert (tests["entry"], tests["cases"][0]) == ("f", first)


def test_the_real_mawps_and_svamp_are_read_whole_and_share_no_problem(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").symlink_to(real("mawps_test.jsonl"))
    (tmp_path / "test.jsonl").symlink_to(real("svamp_test.jsonl"))
    loaded = tasks.load(apart(tmp_path, heldout=1000, name="words"))
    assert len(loaded.heldout) == 1000
    assert {task.reward for task in (*loaded.train, *loaded.heldout)} == {"number"}
    trained, tested = (
        {re.sub(r"[\d\W]+", " ", task.question.lower()) for task in part} for part in (loaded.train, loaded.heldout)
    )
    assert not trained & tested

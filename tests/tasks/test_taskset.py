"""A compiled task set: its digest, its chunks on disk and over the network, user files, filters, and a pool's set."""

import gc
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shoal import tasks
from shoal.config import ConfigError, load, parse
from shoal.config.tasks import SourceSection, TaskSection
from shoal.tasks import compiling, taskset
from shoal.tasks.compiling import Spool, build_tasks, content_id, read_built
from shoal.tasks.sources import reading
from shoal.tasks.sources.rows import TaskFields
from shoal.tasks.task import Task, TasksNotFoundError

# A digest covers Arrow's bytes. If a new pyarrow writes other bytes, this digest changes: say so in the release notes,
# because machines that build the same set with the old and the new version then disagree.
SUMS_DIGEST = "c399df2c43fb25c24cd0f088bc5ae4e804937db17ba21a295aaebfce9c56b049"


def rows(n: int) -> list[dict[str, str]]:
    return [{"question": f"How much is {i} + 1?", "answer": str(i + 1)} for i in range(n)]


def section(path: Path, heldout: int = 4, **more: Any) -> TaskSection:
    return TaskSection(sources=[SourceSection(path=str(path), **more)], heldout=heldout)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(300)))
    return path


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compiling, taskset):
        monkeypatch.setattr(module, "CHUNK_ROWS", 16)


class Coordinator:
    """Serves task data by its hash; records the requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[str] = []
        self.limits: list[int] = []

    def __call__(self, sha256: str, max_bytes: int) -> bytes:
        self.requests.append(sha256)
        self.limits.append(max_bytes)
        return (self.folder / sha256).read_bytes()


def serve(source: Path, folder: Path) -> tuple[TaskSection, Coordinator]:
    """Return the config's section with its digest, and a coordinator that serves the set."""
    built = tasks.load(section(source), folder)
    return section(source).model_copy(update={"digest": built.digest}), Coordinator(folder)


# --- the same tasks on every machine ----------------------------------------------------------------------------------


def test_the_default_set_has_the_recorded_digest() -> None:
    assert tasks.load(TaskSection()).digest == SUMS_DIGEST


@pytest.mark.parametrize("changed", ["question", "answer"])
def test_a_changed_question_answer_or_split_changes_the_digest_and_a_changed_file_format_does_not(
    source: Path, changed: str
) -> None:
    first = tasks.load(section(source)).digest
    source.write_text("".join(json.dumps(row, separators=(" ,", " : ")) + "\n\n" for row in reversed(rows(300))))
    assert tasks.load(section(source)).digest == first
    lines = rows(300)
    lines[7][changed] += "0"
    source.write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert len({first, tasks.load(section(source)).digest, tasks.load(section(source, heldout=5)).digest}) == 3


def test_a_config_with_another_digest_is_refused(source: Path, tmp_path: Path) -> None:
    right = tasks.load(section(source)).digest
    assert tasks.load(section(source).model_copy(update={"digest": right})).digest == right
    wrong = section(source).model_copy(update={"digest": "0" * 64})
    with pytest.raises(TasksNotFoundError, match=f"tasks.digest is 0.*, but the sources give {right}: a file"):
        tasks.load(wrong, tmp_path / "folder")
    assert not (tmp_path / "folder" / compiling.BUILT).exists()


def test_an_id_is_a_hash_of_question_answer_tests_and_metadata() -> None:
    one = TaskFields("?", "5")
    assert content_id(one) == hashlib.sha256(b'{"answer": "5", "question": "?"}').hexdigest()[:16]
    assert content_id(replace(one, reward="math")) == content_id(one)
    others = [replace(one, answer="6"), replace(one, question="!"), replace(one, tests="5"), replace(one, metadata="5")]
    assert len({content_id(other) for other in [one, *others]}) == 5


def test_a_folder_is_reused_without_its_sources_and_rebuilt_for_another_section(source: Path, tmp_path: Path) -> None:
    first = tasks.load(section(source), tmp_path / "folder")
    source.unlink()
    assert tasks.load(section(source), tmp_path / "folder").digest == first.digest
    with pytest.raises(TasksNotFoundError, match="no file or folder"):
        tasks.load(section(source, heldout=5), tmp_path / "folder")


def test_every_file_of_a_set_is_on_disk_before_the_set_counts_as_built(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.fstat(fd).st_ino))
    tasks.load(section(source), tmp_path / "folder")
    assert {path.stat().st_ino for path in (tmp_path / "folder").iterdir()} <= synced


def test_a_temporary_set_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    loaded = tasks.load(TaskSection())
    assert len(list((tmp_path / "tasks").iterdir())) == 1
    train = loaded.train
    del loaded
    gc.collect()
    assert train[3].question, "a view must keep its files"
    del train
    gc.collect()
    assert list((tmp_path / "tasks").iterdir()) == []


# --- on disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_chunks")
def test_no_task_stays_in_memory_and_the_number_of_open_chunks_is_bounded(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taskset, "OPEN_CHUNKS", 3)
    loaded = tasks.load(section(source, name="nowhere-else"))
    assert sum(1 for _ in loaded.train) == 296 and len(loaded.store.mapped) == 3
    gc.collect()
    assert not [task for task in gc.get_objects() if type(task) is Task and task.source == "nowhere-else"]


@pytest.mark.usefixtures("small_chunks")
def test_a_view_is_a_sequence_over_its_chunks(source: Path) -> None:
    loaded = tasks.load(section(source))
    assert [chunk.rows for chunk in loaded.manifest.sources[0].chunks] == [16] * 18 + [8]
    every = list(loaded.train)
    assert len(every) == len(loaded.train) == 296 and len({task.id for task in every}) == 296
    assert [loaded.train[n] for n in range(296)] == loaded.train[0:296] == every
    assert loaded.train[-1] == every[-1] and loaded.train[14:18] == every[14:18]
    assert every[0] in loaded.train
    for at in (296, -297):
        with pytest.raises(IndexError, match="of 296"):
            loaded.train[at]


@pytest.mark.usefixtures("small_chunks")
def test_a_chunk_holds_a_bounded_number_of_bytes(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "CHUNK_BYTES", 300)
    loaded = tasks.load(section(source))
    assert sum(chunk.rows for chunk in loaded.manifest.sources[0].chunks) == len(list(loaded.train)) == 296
    assert max(chunk.rows for chunk in loaded.manifest.sources[0].chunks) < 8


def test_a_changed_chunk_is_refused(source: Path, tmp_path: Path) -> None:
    loaded = tasks.load(section(source), tmp_path / "folder")
    path = tmp_path / "folder" / loaded.manifest.heldout[0].sha256
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    again = tasks.load(section(source), tmp_path / "folder")
    assert again.train[0] == loaded.train[0]
    with pytest.raises(TasksNotFoundError, match=r"was changed: its content has a different hash"):
        again.heldout[0]


# --- over the network -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_chunks")
def test_a_node_fetches_the_manifest_first_and_each_chunk_when_it_is_needed(source: Path, tmp_path: Path) -> None:
    section, coordinator = serve(source, tmp_path / "pool")
    source.unlink()
    loaded = tasks.join(section, tmp_path / "worker", coordinator)
    assert (len(loaded.train), len(loaded.heldout)) == (296, 4)
    assert 0 <= loaded.pick(bytes(range(32))) < 296
    assert coordinator.requests == [section.digest], "counting and drawing must fetch no tasks"
    assert loaded.train[20] == loaded.train[17 + 3]
    chunk = loaded.manifest.sources[0].chunks[1]
    assert coordinator.requests == [section.digest, chunk.sha256]
    assert coordinator.limits == [taskset.MANIFEST_BYTES, chunk.size_bytes], (
        "no fetch may exceed the size in the manifest"
    )
    again = tasks.join(section, tmp_path / "worker", coordinator)
    assert again.train[20] == loaded.train[20] and len(coordinator.requests) == 2, (
        "a restart must request nothing again"
    )


def test_served_data_must_have_the_requested_hash(source: Path, tmp_path: Path) -> None:
    section, coordinator = serve(source, tmp_path / "pool")

    def lying(sha256: str, max_bytes: int) -> bytes:
        return coordinator(sha256, max_bytes).replace(b"How", b"Who")

    with pytest.raises(TasksNotFoundError, match="the coordinator served task data .* with a different hash"):
        tasks.join(section, tmp_path / "worker", lying).train[0]


def test_a_damaged_cache_is_fetched_again(source: Path, tmp_path: Path) -> None:
    section, coordinator = serve(source, tmp_path / "pool")
    task = tasks.join(section, tmp_path / "worker", coordinator).train[5]
    for path in (tmp_path / "worker").iterdir():
        path.write_bytes(b"damaged")
    assert tasks.join(section, tmp_path / "worker", coordinator).train[5] == task


def test_a_set_of_other_sources_and_a_config_without_a_digest_are_refused(source: Path, tmp_path: Path) -> None:
    served, coordinator = serve(source, tmp_path / "pool")
    other = served.model_copy(update={"sources": [SourceSection(generator="arithmetic")]})
    with pytest.raises(TasksNotFoundError, match="has the sources some, which are not the config's"):
        tasks.join(other, tmp_path / "worker", coordinator)
    with pytest.raises(TasksNotFoundError, match="names no task set"):
        tasks.join(section(source), tmp_path / "worker", coordinator)


CHUNK = {"sha256": "0" * 64, "rows": 1, "size_bytes": 1}


def manifest(**changed: Any) -> bytes:
    source = {"name": "arithmetic", "chunks": [CHUNK], "train": 1, "heldout": 0}
    content: dict[str, Any] = {"format": taskset.FORMAT, "sources": [source], "heldout": [], "files": {}}
    return json.dumps(content | changed).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"no json",
        manifest(format="shoal-tasks-9"),
        manifest(heldout=[CHUNK | {"size_bytes": taskset.MAX_CHUNK_BYTES + 1}]),
        manifest(heldout=[CHUNK] * (taskset.MAX_CHUNKS + 1)),
        manifest(files={f"{n}.py": "0" * 64 for n in range(taskset.MAX_FILES + 1)}),
        manifest(files={"mine.py": "../keys"}),
        manifest(files={"mine.py": "/etc/passwd"}),
    ],
    ids=["empty", "no JSON", "another format", "chunk", "chunks", "files", "file outside", "absolute path"],
)
def test_a_manifest_of_another_format_or_beyond_its_bounds_is_refused(data: bytes, tmp_path: Path) -> None:
    """A hostile path must not reach `keys`, because the store deletes a file whose name is not its hash."""
    (tmp_path / "keys").write_text("secret")
    taskset.TaskManifest.decode(manifest())
    section = TaskSection(digest=hashlib.sha256(data).hexdigest())
    with pytest.raises(TasksNotFoundError, match="the manifest of the task set is invalid in this version of Shoal"):
        _ = tasks.join(section, tmp_path / "worker", lambda *_: data).files
    assert (tmp_path / "keys").read_text() == "secret"


def test_a_chunk_of_another_size_than_its_manifest_says_is_refused(tmp_path: Path) -> None:
    store = taskset.TaskStore(tmp_path)
    texts = [pa.array(["text"]) for _ in taskset.COLUMNS]
    chunk = store.write(pa.table(texts, schema=taskset.SCHEMA))
    with pytest.raises(TasksNotFoundError, match="bytes, but its manifest says"):
        store.batch(chunk.model_copy(update={"size_bytes": chunk.size_bytes + 1}))


@pytest.mark.parametrize("order", [("math", "number", ""), ("number", "", "math"), ("math", "", "number")])
def test_rows_that_differ_only_in_their_reward_merge_to_the_same_task_in_any_order(
    tmp_path: Path, order: tuple[str, ...]
) -> None:
    spool = Spool(tmp_path / "rows")
    for n, reward in enumerate(order):
        spool.add(0, "s", TaskFields("1+1?", "2", reward=reward))
        spool.add(0, "s", TaskFields(f"{n}?", "3"))
    spool.finish()
    rows = [row for row in spool.table.take(spool.rows).to_pylist() if row["question"] == "1+1?"]
    assert [row["reward"] for row in rows] == [""] and list(spool.merged) == [2]


def test_a_chunk_whose_offsets_point_outside_of_its_text_is_refused(tmp_path: Path) -> None:
    """Without the check, Arrow would read other memory of this process."""
    store = taskset.TaskStore(tmp_path)
    texts = [pa.array(["some text"] * 2) for _ in taskset.COLUMNS]
    chunk = store.write(pa.table(texts, schema=taskset.SCHEMA))
    good = store.read(chunk.sha256, chunk.size_bytes)
    offsets = b"".join(n.to_bytes(4, "little") for n in (0, 9, 18))
    assert good.count(offsets) == len(taskset.COLUMNS)
    bad = good.replace(offsets, b"".join(n.to_bytes(4, "little") for n in (0, 9, 1 << 30)))
    hostile = taskset.TaskChunk(sha256=store.put(bad), rows=2, size_bytes=len(bad))
    with pytest.raises(TasksNotFoundError, match="not readable as task data"):
        store.batch(hostile)


# --- user files -------------------------------------------------------------------------------------------------------


def test_reward_files_reach_other_nodes_and_are_part_of_the_digest(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = tasks.load(section(source)).digest
    Path("mine.py").write_text("def exact(task, completion): return 1.0\n")
    with_reward = section(source, reward="mine.py:exact")
    pool = tasks.load(with_reward, tmp_path / "pool")
    assert pool.digest != plain
    Path("mine.py").unlink()
    coordinator = Coordinator(tmp_path / "pool")
    joined = tasks.join(with_reward.model_copy(update={"digest": pool.digest}), tmp_path / "worker", coordinator)
    assert joined.files == {"mine.py": b"def exact(task, completion): return 1.0\n"}


def test_reward_files_of_the_same_name_or_too_large_are_refused(source: Path, tmp_path: Path) -> None:
    for n in "ab":
        (tmp_path / n).mkdir()
        (tmp_path / n / "mine.py").write_text(f"def exact(task, completion): return 1.0  # {n}\n")
    sources = [SourceSection(name=n, path=str(source), reward=f"{tmp_path / n / 'mine.py'}:exact") for n in "ab"]
    with pytest.raises(TasksNotFoundError, match=r"two reward or environment files are named mine.py; rename"):
        tasks.load(TaskSection(sources=sources, heldout=4))
    (tmp_path / "a" / "mine.py").write_text("#" * (2 << 20))
    with pytest.raises(TasksNotFoundError, match="has 2.1 MB"):
        tasks.load(TaskSection(sources=sources, heldout=4))


def test_a_file_with_a_reward_and_an_environment_is_refused(source: Path, tmp_path: Path) -> None:
    """Workers get the files of environments."""
    (tmp_path / "mine.py").write_text("class Echo: ...\ndef exact(task, completion): return 1.0\n")
    one, other = ({"reward": f"{tmp_path / 'mine.py'}:exact"}, {"environment": f"{tmp_path / 'mine.py'}:Echo"})
    for sources in ([one | other], [one, other]):
        section = [SourceSection(name=str(n), path=str(source), **each) for n, each in enumerate(sources)]
        with pytest.raises(TasksNotFoundError, match=r"mine.py holds a reward and an environment, .* another file"):
            tasks.load(TaskSection(sources=section, heldout=4))


# --- the set for workers ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_chunks")
def test_the_set_for_workers_has_the_same_training_questions_and_nothing_else(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    lines = [row | {"question": f"{row['question']} Really?", "metadata": {"n": 1}} for row in rows(40)]
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = TaskSection(
        sources=[SourceSection(path=str(source)), SourceSection(path=str(other), weight=2)], heldout=9
    )
    whole = tasks.load(section, tmp_path / "pool")
    built = read_built(tmp_path / "pool")
    assert built is not None
    coordinator = Coordinator(tmp_path / "pool" / "public")
    public = tasks.join(section.public(built.public), tmp_path / "worker", coordinator)
    assert [Task("", task.question, "", task.source) for task in whole.train] == list(public.train)
    drawn = [hashlib.sha256(str(n).encode()).digest() for n in range(200)]
    assert [whole.pick(each) for each in drawn] == [public.pick(each) for each in drawn]
    assert not public.heldout and not public.files and len(public.manifest.sources[0].chunks) > 1
    names = {path.name for path in (tmp_path / "pool").iterdir()}
    assert not names & {path.name for path in (tmp_path / "pool" / "public").iterdir()}, "the files must be others"


def test_an_own_environment_for_tasks_of_a_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its metadata, which the environment would see, tells the library's answers."""
    rows = [{"question": f"{n}?", "answer": "1", "reward": "number"} for n in range(40)]
    monkeypatch.setitem(reading.GENERATORS, "reasoning_gym", lambda _: rows)
    (tmp_path / "mine.py").write_text("class Echo: ...\n")
    source = SourceSection(generator="reasoning_gym", environment=f"{tmp_path / 'mine.py'}:Echo")
    with pytest.raises(TasksNotFoundError, match="source reasoning_gym: an environment of your own sees metadata"):
        tasks.load(TaskSection(sources=[source], heldout=4))


# --- filters ----------------------------------------------------------------------------------------------------------


def kept(path: Path, ids: list[str], **changed: Any) -> str:
    path.write_text(json.dumps({"format": "shoal-filter-1", "digest": "0" * 64, "kept": ids} | changed))
    return str(path)


def test_a_filters_manifest_restricts_only_training_tasks(source: Path, tmp_path: Path) -> None:
    every = tasks.load(section(source))
    ids = [task.id for task in every.train[10:60]]
    loaded = tasks.load(section(source, keep=kept(tmp_path / "kept.json", [*ids, "other/0000000000000000"])))
    assert [task.id for task in loaded.train] == ids and list(loaded.heldout) == list(every.heldout)
    assert loaded.digest != every.digest


@pytest.mark.parametrize(
    ("ids", "changed", "message"),
    [
        (
            ["some/00000000000000ff"],
            {},
            r"1 of 51 tasks in .* are not in the source, for example some/00000000000000ff",
        ),
        (["some/none"], {}, r"is not a manifest of `shoal filter`"),
        ([], {"format": "shoal-filter-9"}, r"its format is 'shoal-filter-9'"),
        ([], {"kept": []}, r"keeps 0 training tasks, but 16 are needed; widen the band"),
    ],
)
def test_a_filters_manifest_that_does_not_match_is_refused(
    source: Path, tmp_path: Path, ids: list[str], changed: dict[str, Any], message: str
) -> None:
    some = [task.id for task in tasks.load(section(source)).train[:50]]
    with pytest.raises(TasksNotFoundError, match=message):
        tasks.load(section(source, keep=kept(tmp_path / "kept.json", [*some, *ids], **changed)))


# --- the set of a pool -----------------------------------------------------------------------------------------------

CONFIG = parse({"tasks": {"heldout": 64}, "evaluator": {"n": 8}})


def test_the_tasks_of_a_pool_never_change(tmp_path: Path) -> None:
    config, notes = build_tasks(CONFIG, tmp_path / "tasks")
    assert notes == ["arithmetic: 836 tasks to train on, 64 held out"]
    assert build_tasks(config, tmp_path / "tasks")[0] == build_tasks(CONFIG, tmp_path / "tasks")[0] == config
    with pytest.raises(ConfigError, match="no file or folder"):
        build_tasks(parse({"tasks": {"sources": [{"path": "nowhere.jsonl"}]}}), tmp_path / "other")
    changed = parse({"tasks": {"heldout": 65}, "evaluator": {"n": 8}})
    with pytest.raises(ConfigError, match=f"tasks.digest is {config.tasks.digest}, but the sources give .* whole run"):
        build_tasks(changed, tmp_path / "tasks")
    built = read_built(tmp_path / "tasks")
    assert built is not None and built.digest == config.tasks.digest


def test_pool_init_builds_the_pools_tasks(tmp_path: Path) -> None:
    from shoal.cli.main import DONE, main

    rows = tmp_path / "some.jsonl"
    rows.write_text("".join(f'{{"text": "{n} + 1", "gold": {n + 1}}}\n' for n in range(30)))
    path = tmp_path / "sums.toml"
    path.write_text(
        '[model]\nname = "bundled:tiny"\n[sampling]\nmax_tokens = 8\n[evaluator]\nn = 8\n'
        "[tasks]\nheldout = 8\n"
        '[[tasks.sources]]\npath = "some.jsonl"\nfields = { question = "text", answer = "gold" }\n'
        '[[tasks.sources]]\ngenerator = "arithmetic"\noptions = { operand_max = 9 }\nweight = 3\n'
    )
    assert main(["pool", "init", str(path), "--dir", str(tmp_path / "pool"), "--url", "http://127.0.0.1:8700"]) == DONE
    config = load(tmp_path / "pool" / "config.toml")
    built = read_built(tmp_path / "pool" / "tasks")
    assert built is not None and config.tasks.digest == built.digest
    assert [child.name for child in tmp_path.iterdir() if child.name.startswith(".")] == [], (
        "a temporary folder was left"
    )
    rows.unlink()
    assert build_tasks(config, tmp_path / "pool" / "tasks")[0] == config, (
        "the pool's coordinator must not read the sources again"
    )

"""Reads a source of the config row by row: a file, a folder, a hub data set or a generator, through a schema or a field map.

A file of a folder or data set belongs to the split whose name is a word of its path below the folder ("gsm8k_test.jsonl",
"test-00000-of-00001.parquet", "test/0000.parquet"). Where no file names a split, all are of the split `train`.
Invariants: a row becomes fields, is counted as left out because its data set marks it so, or is an error that names file and
row. Rows pass one at a time. The same files in any order of listing give the same answer.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from shoal.config.tasks import SourceSection
from shoal.model.sources import HubError, ask
from shoal.tasks import libraries
from shoal.tasks.sources import generators, schemas
from shoal.tasks.sources.rows import SUFFIXES, LeftOutError, Row, RowError, Rows, TaskFields, as_json, text, value
from shoal.tasks.sources.schemas import RowSchema
from shoal.tasks.task import TasksNotFoundError

T = TypeVar("T")
DEFAULT_SPLIT = "train"
KNOWN_SPLITS = ("train", "training", "test", "validation", "valid", "val", "dev", "eval", "heldout")
GENERATORS: dict[str, Callable[[Mapping[str, Any]], Sequence[dict[str, str]]]] = {
    "arithmetic": generators.arithmetic,
    "functions": generators.functions,
    "reasoning_gym": partial(libraries.rows, "reasoning_gym"),
    "verifiers": partial(libraries.rows, "verifiers"),
}
FIELDS = ("question", "answer", "tests", "metadata")
MAX_TEXT_BYTES = 1 << 20  # of a question, an answer, or metadata
MAX_TESTS_BYTES = 64 << 20


class SourceReading:
    """One split of a source while it is read; afterwards it knows which schemas it met and what it left out."""

    def __init__(self, source: SourceSection, split: str) -> None:
        self.source = source
        self.split = split
        self.schemas: list[str] = []
        self.left_out: Counter[str] = Counter()
        self.where = ""  # of the newest row, for error messages

    def __iter__(self) -> Iterator[TaskFields]:
        """Return every row that is a task. Raises TasksNotFoundError."""
        return self._generated() if self.source.generator else self._from_files()

    def _generated(self) -> Iterator[TaskFields]:
        name = self.source.generator
        if name not in GENERATORS:
            raise TasksNotFoundError(f"no generator {name!r}; there are {', '.join(GENERATORS)}")
        for number, row in enumerate(GENERATORS[name](self.source.options), start=1):
            self.where = f"source {self.source.label}, row {number}"
            yield self._checked(TaskFields(**row))

    def _from_files(self) -> Iterator[TaskFields]:
        for path in locate(self.source, self.split):
            rows = Rows(path)
            if rows.first is None:
                raise TasksNotFoundError(f"{path} holds no rows; remove it or correct the source's path")
            self.where = f"{path}, row 1"
            schema = self._named(lambda rows=rows: self._schema(rows.columns, rows.first or {}))
            if schema.name not in self.schemas:
                self.schemas.append(schema.name)
            columns = [name for name in (*schema.needs, *schema.reads) if name in rows.columns]
            for number, row in rows.read(columns):
                self.where = f"{path}, row {number}"
                try:
                    yield self._checked(self._named(lambda row=row, schema=schema: schema.read(row)))
                except LeftOutError as reason:
                    self.left_out[str(reason)] += 1

    def _schema(self, columns: list[str], first: Row) -> RowSchema:
        if not self.source.fields:
            return schemas.recognise(columns, first)
        return mapped(self.source.fields, columns)

    def _named(self, read: Any) -> Any:
        """Return what `read` returns; its error gets file and row."""
        try:
            return read()
        except RowError as error:
            raise TasksNotFoundError(f"{self.where}: {error}") from error
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise TasksNotFoundError(
                f"{self.where} is not as its schema says ({type(error).__name__}: {error}); name its columns in `fields`"
            ) from error

    def _checked(self, fields: TaskFields) -> TaskFields:
        """Return the fields, if they can be a task."""
        if not fields.question.strip():
            raise TasksNotFoundError(f"{self.where}: the question is empty; remove the row")
        if not (fields.reward or self.source.reward) and fields.answer:
            raise TasksNotFoundError(
                f"{self.where}: the answer {fields.answer[:40]!r} is not a number; name the source's reward, for example "
                'reward = "math" or "my_rewards.py:exact"'
            )
        for name in FIELDS:
            limit = MAX_TESTS_BYTES if name == "tests" else MAX_TEXT_BYTES
            held = getattr(fields, name)
            try:
                size = len(held) if len(held) <= limit // 4 and held.isascii() else len(held.encode())
            except UnicodeEncodeError as error:
                raise TasksNotFoundError(f"{self.where}: {name} holds half a surrogate pair; remove the row") from error
            if size > limit:
                raise TasksNotFoundError(
                    f"{self.where}: {name} holds {size / 1e6:.1f} MB, at most {limit / 1e6:.1f} MB are allowed; shorten "
                    "or remove it"
                )
        return fields


def mapped(fields: dict[str, str], columns: list[str]) -> RowSchema:
    """Return a schema that reads the columns named in the config. Raises RowError for unknown fields."""
    if unknown := sorted(set(fields) - set(FIELDS)):
        raise RowError(f"fields names {unknown[0]!r}; the fields are {', '.join(FIELDS)}")
    wanted = dict(fields)
    for name in ("question", "answer"):
        if name not in wanted and name in columns:
            wanted[name] = name
    if "question" not in wanted:
        raise RowError(
            f"no column question: there are {', '.join(columns)}; say which holds the question: fields = "
            '{ question = "..." }'
        )
    tops = tuple(path if path in columns else path.split(".")[0] for path in wanted.values())
    for top in tops:
        if top not in columns:
            raise RowError(f"no column {top}: there are {', '.join(columns)}; correct `fields`")

    def read(row: Row) -> TaskFields:
        return TaskFields(
            text(row, wanted["question"]),
            text(row, wanted["answer"]) if "answer" in wanted else "",
            tests=as_json(value(row, wanted["tests"])) if "tests" in wanted else "",
            metadata=as_json(value(row, wanted["metadata"])) if "metadata" in wanted else "",
            reward=_default_reward(row, wanted),
        )

    return RowSchema("fields", tops, read)


def _default_reward(row: Row, wanted: dict[str, str]) -> str:
    if "tests" in wanted:
        return "code"
    answer = text(row, wanted["answer"]) if "answer" in wanted else ""
    return "number" if schemas.NUMERIC.fullmatch(answer.strip()) else ""


# --- the files of a split ---------------------------------------------------------------------------------------------


def locate(source: SourceSection, split: str) -> list[Path]:
    """Return the files of one split, in the order of their names. Raises TasksNotFoundError."""
    if source.hub:
        return _from_hub(source, split)
    path = Path(source.path).expanduser()
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES)]
        names = {file.relative_to(path).as_posix(): file for file in files if not file.name.startswith(".")}
        return [names[name] for name in of_split(list(names), split, str(path))]
    if not path.is_file():
        raise TasksNotFoundError(
            f"no file or folder at {path}, neither from {Path.cwd()} nor beside the config; correct the source's path"
        )
    if not path.name.endswith(SUFFIXES):
        raise TasksNotFoundError(f"{path} is neither of {', '.join(SUFFIXES)}; convert it to JSON lines")
    if split not in (DEFAULT_SPLIT, *_words(path.name)):
        raise TasksNotFoundError(
            f"{path} is one file, without a split {split!r}: leave split and heldout_split out, or give a folder with a "
            f"file for each split, for example {split}.jsonl"
        )
    return [path]


def of_split(names: Sequence[str], split: str, where: str) -> list[str]:
    """Return the files that belong to a split. Raises TasksNotFoundError, which lists the splits that are there."""
    if not names:
        raise TasksNotFoundError(f"{where} holds no file of {', '.join(SUFFIXES)}; correct the source")
    splits = {name: [word for word in _words(name) if word == split or word in KNOWN_SPLITS] for name in sorted(names)}
    if not any(splits.values()) and split == DEFAULT_SPLIT:
        return list(splits)
    chosen = [name for name, words in splits.items() if split in words]
    if not chosen:
        known = sorted({word for words in splits.values() for word in words}) or [DEFAULT_SPLIT]
        raise TasksNotFoundError(
            f"{where} has no split {split!r}; there are {', '.join(known)}: set split or heldout_split"
        )
    return chosen


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())


# --- the hub --------------------------------------------------------------------------------------------------------


def _from_hub(source: SourceSection, split: str) -> list[Path]:
    from huggingface_hub import HfApi, hf_hub_download

    organisation, name, *config = source.hub.strip("/").split("/")
    repository, revision = f"{organisation}/{name}", source.revision or None
    asked: dict[str, Any] = {"repo_type": "dataset", "revision": revision}
    names = _ask(source, partial(HfApi().list_repo_files, repository, **asked))
    held = [file for file in names if file.endswith(SUFFIXES)]
    chosen = of_split(_of_config(held, "/".join(config), source), split, f"data set {source.hub}")
    return [Path(_ask(source, partial(hf_hub_download, repository, file, **asked))) for file in chosen]


def _of_config(names: Sequence[str], config: str, source: SourceSection) -> list[str]:
    """Return the files of a config: in a folder of its name, or with it in their name. Without a config: one folder's."""
    if config:
        chosen = [name for name in names if f"/{config.lower()}/" in f"/{name.lower()}"]
        chosen = chosen or [name for name in names if config.lower() in PurePosixPath(name).name.lower()]
        if not chosen:
            raise TasksNotFoundError(f"data set {source.hub}: no file of config {config!r}; there are {_listed(names)}")
        return chosen
    configs = {name.split("/")[0] for name in names if "/" in name} - {"data", *KNOWN_SPLITS}
    if len(configs) > 1:
        raise TasksNotFoundError(
            f'data set {source.hub} has several configs: write hub = "{source.hub}/CONFIG" with one of '
            f"{', '.join(sorted(configs)[:20])}"
        )
    if not names:
        raise TasksNotFoundError(
            f"data set {source.hub} holds no file of {', '.join(SUFFIXES)}; most have one at revision = "
            '"refs/convert/parquet", or convert it and set path'
        )
    return list(names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)[:12]) or "no readable files"


def _ask(source: SourceSection, request: Callable[[], T]) -> T:
    try:
        return ask(request)
    except HubError as error:
        organisation, name, *config = source.hub.strip("/").split("/")
        raise TasksNotFoundError(
            f"data set {source.hub} could not be fetched from the Hugging Face hub ({error}); without a connection, "
            f"download it elsewhere (hf download {organisation}/{name} --repo-type dataset --local-dir FOLDER) and set "
            f'path = "{"/".join(["FOLDER", *config])}" in place of hub'
        ) from error

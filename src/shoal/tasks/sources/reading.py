"""Read a source of the config row by row: a file, a folder, a hub data set or a generator.

A schema or the config's field map turns each row into a task.
A file of a folder or data set belongs to the split whose name is a word of the file's path below the folder. Examples for
`test`: "gsm8k_test.jsonl", "test-00000-of-00001.parquet", "test/0000.parquet". If no file names a split, all files belong
to `train`.
Invariants: each row becomes a task, is counted as left out with a reason, or raises an error that names file and row.
The order in which files are listed does not matter.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from shoal.config.tasks import SourceSection
from shoal.errors import user_path
from shoal.model.sources import HubError, call_hub
from shoal.tasks import libraries
from shoal.tasks.rewards.answers import last_number
from shoal.tasks.sources import code_tests, generators, schemas
from shoal.tasks.sources.rows import SUFFIXES, LeftOutError, Row, RowError, TaskFields, as_json, read_rows, text, value
from shoal.tasks.sources.schemas import RowSchema
from shoal.tasks.task import TasksNotFoundError

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


class SourceReader:
    """Reads one split of a source. It records the recognized schemas, and the number of left-out rows by reason."""

    def __init__(self, source: SourceSection, split: str) -> None:
        self.source = source
        self.split = split
        self.schemas: list[str] = []
        self.left_out: Counter[str] = Counter()
        self.where = ""  # the current row, for error messages

    def __iter__(self) -> Iterator[TaskFields]:
        """Yield every row that is a task. Raise TasksNotFoundError."""
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
            first = next((row for _, row in read_rows(path)), None)
            if first is None:
                raise TasksNotFoundError(f"{path} holds no rows; remove it or correct the source's path")
            self.where = f"{path}, row 1"
            with self._naming_the_row():
                if self.source.fields:
                    schema = schema_of_fields(self.source.fields, list(first))
                else:
                    schema = schemas.recognize(first)
            if schema.name not in self.schemas:
                self.schemas.append(schema.name)
            columns = [name for name in (*schema.needs, *schema.reads) if name in first]
            for number, row in read_rows(path, columns):
                self.where = f"{path}, row {number}"
                try:
                    with self._naming_the_row():
                        fields = schema.read(row)
                except LeftOutError as reason:
                    self.left_out[str(reason)] += 1
                else:
                    yield self._checked(fields)

    @contextmanager
    def _naming_the_row(self) -> Iterator[None]:
        """Add the file and the row to any error of the block."""
        try:
            yield
        except RowError as error:
            raise TasksNotFoundError(f"{self.where}: {error}") from error
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise TasksNotFoundError(
                f"{self.where} does not match its schema ({type(error).__name__}: {error}); name its columns in `fields`"
            ) from error

    def _checked(self, fields: TaskFields) -> TaskFields:
        """Return the fields. Raise TasksNotFoundError if they are not a valid task."""
        if not fields.question.strip():
            raise TasksNotFoundError(f"{self.where}: the question is empty; remove the row")
        for name in FIELDS:
            limit = MAX_TESTS_BYTES if name == "tests" else MAX_TEXT_BYTES
            content = getattr(fields, name)
            try:
                size = len(content) if content.isascii() else len(content.encode())
            except UnicodeEncodeError as error:
                raise TasksNotFoundError(f"{self.where}: {name} holds half a surrogate pair; remove the row") from error
            if size > limit:
                raise TasksNotFoundError(
                    f"{self.where}: {name} has {size / 1e6:.1f} MB, more than {limit / 1e6:.1f} MB: shorten or remove it"
                )
        rewards = self.source.reward or fields.reward
        if not rewards:
            what = f"the answer {fields.answer[:40]!r} is not a number" if fields.answer else "the row has no answer"
            raise TasksNotFoundError(
                f'{self.where}: {what}; name the source\'s reward, for example reward = "math" or "my_rewards.py:exact"'
            )
        for reward in [rewards] if isinstance(rewards, str) else rewards:
            if why := _why_not_gradable(reward, fields):
                raise TasksNotFoundError(f"{self.where}: the reward {reward!r} cannot grade this row: {why}")
        return fields


def _why_not_gradable(reward: str, fields: TaskFields) -> str:
    """Return what a task lacks for one of the package's own rewards; "" if nothing."""
    if reward == "code":
        try:
            code_tests.read_tests(fields.tests)
        except code_tests.TestsError as error:
            return f"{error}; or remove the row"
    if reward == "number" and last_number(fields.answer) is None:
        return f"its answer {fields.answer[:40]!r} has no number; correct or remove the row"
    if reward.startswith("math") and not fields.answer.strip():
        return 'it has no answer; name the column in the config, as in fields = { answer = "..." }, or remove the row'
    return ""


def schema_of_fields(fields: dict[str, str], columns: list[str]) -> RowSchema:
    """Return a schema that reads the columns named in the config. Raise RowError for unknown fields."""
    if unknown := sorted(set(fields) - set(FIELDS)):
        raise RowError(f"`fields` has no key {unknown[0]!r}; its keys are {', '.join(FIELDS)}")
    paths = {name: name for name in ("question", "answer") if name in columns} | fields
    if "question" not in paths:
        raise RowError(
            f"no column question: there are {', '.join(columns)}; name the question's column: fields = "
            '{ question = "..." }'
        )
    tops = tuple(path if path in columns else path.split(".")[0] for path in paths.values())
    for top in tops:
        if top not in columns:
            raise RowError(f"no column {top}: there are {', '.join(columns)}; correct `fields`")

    def read(row: Row) -> TaskFields:
        answer = text(row, paths["answer"]) if "answer" in paths else ""
        return TaskFields(
            text(row, paths["question"]),
            answer,
            tests=as_json(value(row, paths["tests"])) if "tests" in paths else "",
            metadata=as_json(value(row, paths["metadata"])) if "metadata" in paths else "",
            reward=schemas.default_reward(answer, has_tests="tests" in paths),
        )

    return RowSchema("fields", tops, read)


# --- the files of a split ---------------------------------------------------------------------------------------------


def locate(source: SourceSection, split: str) -> list[Path]:
    """Return the files of one split, sorted by name. Raise TasksNotFoundError."""
    if source.hub:
        return _from_hub(source, split)
    path = user_path(source.path)
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES)]
        names = {file.relative_to(path).as_posix(): file for file in files if not file.name.startswith(".")}
        return [names[name] for name in of_split(list(names), split, str(path))]
    if not path.is_file():
        raise TasksNotFoundError(
            f"no file or folder at {path}, neither in {Path.cwd()} nor beside the config; correct the source's path"
        )
    if not path.name.endswith(SUFFIXES):
        raise TasksNotFoundError(f"the name of {path} ends in none of {', '.join(SUFFIXES)}; convert it to JSON lines")
    if split not in (DEFAULT_SPLIT, *_words(path.name)):
        raise TasksNotFoundError(
            f"{path} is one file, without a split {split!r}: omit split and heldout_split, or give a folder with a file for "
            f"each split, for example {split}.jsonl"
        )
    return [path]


def of_split(names: Sequence[str], split: str, where: str) -> list[str]:
    """Return the files that belong to a split. Raise TasksNotFoundError, which lists the existing splits."""
    if not names:
        raise TasksNotFoundError(f"{where} holds no {', '.join(SUFFIXES)} file; correct the source")
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
    repository = f"{organisation}/{name}"
    options: dict[str, Any] = {"repo_type": "dataset", "revision": source.revision or None}
    try:
        names = call_hub(partial(HfApi().list_repo_files, repository, **options))
        readable = [file for file in names if file.endswith(SUFFIXES)]
        chosen = of_split(_of_config(readable, "/".join(config), source), split, f"data set {source.hub}")
        return [Path(call_hub(partial(hf_hub_download, repository, file, **options))) for file in chosen]
    except HubError as error:
        raise TasksNotFoundError(
            f"data set {source.hub} could not be fetched from the Hugging Face hub ({error}); without a connection, "
            f"download it elsewhere (hf download {repository} --repo-type dataset --local-dir FOLDER) and set "
            f'path = "{"/".join(["FOLDER", *config])}" instead of hub'
        ) from error


def _of_config(names: Sequence[str], config: str, source: SourceSection) -> list[str]:
    """Return the files of a data set's config: those in a folder of that name, or else those whose name contains it.

    Without a config, the files must be in one folder. Raise TasksNotFoundError.
    """
    if config:
        chosen = [name for name in names if f"/{config.lower()}/" in f"/{name.lower()}"]
        chosen = chosen or [name for name in names if config.lower() in PurePosixPath(name).name.lower()]
        if not chosen:
            listed = ", ".join(sorted(names)[:12]) or "no readable files"
            raise TasksNotFoundError(f"data set {source.hub}: no file of config {config!r}; there are {listed}")
        return chosen
    configs = {name.split("/")[0] for name in names if "/" in name} - {"data", *KNOWN_SPLITS}
    if len(configs) > 1:
        raise TasksNotFoundError(
            f'data set {source.hub} has several configs: write hub = "{source.hub}/CONFIG" with one of '
            f"{', '.join(sorted(configs)[:20])}"
        )
    if not names:
        raise TasksNotFoundError(
            f"data set {source.hub} holds no {', '.join(SUFFIXES)} file; set revision = "
            '"refs/convert/parquet", where most data sets have one, or convert it and set path'
        )
    return list(names)

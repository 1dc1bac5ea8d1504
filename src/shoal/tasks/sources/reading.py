"""Reads a source of the config row by row: a file, a folder, a hub data set or a generator, through a schema or a field map.

Invariant: a row becomes fields, is counted as left out because its data set marks it so, or is an error that names file and
row. Rows pass one at a time. Called by `compiling`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shoal.config.tasks import SourceSection
from shoal.tasks.adapters.reasoning_gym import reasoning_gym
from shoal.tasks.adapters.verifiers import verifiers
from shoal.tasks.sources import schemas
from shoal.tasks.sources.arithmetic import arithmetic
from shoal.tasks.sources.fields import Fields, LeftOutError, Row, RowError, as_json, text, value
from shoal.tasks.sources.functions import functions
from shoal.tasks.sources.locate import locate
from shoal.tasks.sources.rows import Rows
from shoal.tasks.sources.schemas import Schema
from shoal.tasks.task import TasksNotFoundError

GENERATORS: dict[str, Callable[[Mapping[str, Any]], Sequence[dict[str, str]]]] = {
    "arithmetic": arithmetic,
    "functions": functions,
    "reasoning_gym": reasoning_gym,
    "verifiers": verifiers,
}
FIELDS = ("question", "answer", "tests", "metadata")
MAX_TEXT_BYTES = 1 << 20  # of a question, an answer, or metadata
MAX_TESTS_BYTES = 64 << 20


class Reading:
    """One split of a source while it is read; afterwards it knows which schemas it met and what it left out."""

    def __init__(self, source: SourceSection, split: str) -> None:
        self.source = source
        self.split = split
        self.schemas: list[str] = []
        self.left_out: Counter[str] = Counter()
        self.where = ""  # of the newest row, for error messages

    def __iter__(self) -> Iterator[Fields]:
        """Every row that is a task. Raises TasksNotFoundError."""
        return self._generated() if self.source.generator else self._from_files()

    def _generated(self) -> Iterator[Fields]:
        name = self.source.generator
        if name not in GENERATORS:
            raise TasksNotFoundError(f"no generator {name!r}; there are {', '.join(GENERATORS)}")
        for number, row in enumerate(GENERATORS[name](self.source.options), start=1):
            self.where = f"source {self.source.label}, row {number}"
            yield self._checked(Fields(**row))

    def _from_files(self) -> Iterator[Fields]:
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

    def _schema(self, columns: list[str], first: Row) -> Schema:
        if not self.source.fields:
            return schemas.recognise(columns, first)
        return mapped(self.source.fields, columns)

    def _named(self, read: Any) -> Any:
        """What `read` returns; its error gets file and row."""
        try:
            return read()
        except RowError as error:
            raise TasksNotFoundError(f"{self.where}: {error}") from error
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise TasksNotFoundError(
                f"{self.where} is not as its schema says ({type(error).__name__}: {error}); name its columns in `fields`"
            ) from error

    def _checked(self, fields: Fields) -> Fields:
        """The fields, if they can be a task."""
        if not fields.question.strip():
            raise TasksNotFoundError(f"{self.where}: the question is empty; remove the row")
        if not (fields.reward or self.source.reward) and fields.answer:
            raise TasksNotFoundError(
                f"{self.where}: the answer {fields.answer[:40]!r} is not a number; name the source's reward, for example "
                'reward = "math" or "my_rewards.py:exact"'
            )
        for name in FIELDS:
            most = MAX_TESTS_BYTES if name == "tests" else MAX_TEXT_BYTES
            held = getattr(fields, name)
            try:
                size = len(held) if len(held) <= most // 4 and held.isascii() else len(held.encode())
            except UnicodeEncodeError as error:
                raise TasksNotFoundError(f"{self.where}: {name} holds half a surrogate pair; remove the row") from error
            if size > most:
                raise TasksNotFoundError(
                    f"{self.where}: {name} holds {size / 1e6:.1f} MB, at most {most / 1e6:.1f} MB are allowed; shorten "
                    "or remove it"
                )
        return fields


def mapped(fields: dict[str, str], columns: list[str]) -> Schema:
    """A schema that reads the columns named in the config. Raises RowError for unknown fields."""
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

    def read(row: Row) -> Fields:
        return Fields(
            text(row, wanted["question"]),
            text(row, wanted["answer"]) if "answer" in wanted else "",
            tests=as_json(value(row, wanted["tests"])) if "tests" in wanted else "",
            metadata=as_json(value(row, wanted["metadata"])) if "metadata" in wanted else "",
            reward=_default_reward(row, wanted),
        )

    return Schema("fields", tops, read)


def _default_reward(row: Row, wanted: dict[str, str]) -> str:
    if "tests" in wanted:
        return "code"
    answer = text(row, wanted["answer"]) if "answer" in wanted else ""
    return "number" if schemas.NUMERIC.fullmatch(answer.strip()) else ""

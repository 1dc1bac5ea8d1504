"""Compile the sources of a config into a task set on disk: split off held-out tasks, merge duplicates, write hashed chunks.

    read     write the rows of each split of each source to a spool on disk
    split    hold out the tasks with the smallest question hashes, or those of `heldout_split`
    write    chunks of training tasks per source and of all held-out tasks; then the manifest

Invariants: equal rows give the same files, in any order and split over any files; no question is on both sides. No more
than one batch of rows is held as Python objects; 48 bytes a row sort them.
"""

import hashlib
import json
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ValidationError

from shoal.config import Config, ConfigError
from shoal.config.tasks import SourceSection, TaskSection
from shoal.files import write_file
from shoal.tasks.own import is_own
from shoal.tasks.sources.reading import SourceReading
from shoal.tasks.sources.rows import TaskFields
from shoal.tasks.task import TasksNotFoundError
from shoal.tasks.taskset import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    COLUMNS,
    FILE_BYTES,
    SCHEMA,
    SourceTasks,
    TaskManifest,
    TaskStore,
)

Numbers = np.ndarray
KEY_BYTES = 32
MIN_TRAIN = 16
BUILT = "built.json"


class Spool:
    """All rows on disk, in reading order, and their sort keys in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer = pa.ipc.new_file(str(path), SCHEMA)
        self._columns: dict[str, list[str]] = {name: [] for name in COLUMNS}
        self._held_bytes = 0
        self._keys, self._ids, self._sizes, self._parts = bytearray(), array("Q"), array("I"), array("I")
        self._rewards: dict[str, int] = {}  # by name, in reading order
        self._reward = array("I")  # of each row, as its number there

    def add(self, part: int, source: str, fields: TaskFields) -> None:
        """Add a row. Tasks are sorted and merged within a `part`, one per split of a source."""
        name = content_id(fields)
        self._keys += order_key(fields.question)
        self._ids.append(int(name, 16))
        self._parts.append(part)
        row = (f"{source}/{name}", fields.question, fields.answer, source, *astuple(fields)[2:])
        for values, held in zip(self._columns.values(), row, strict=True):
            values.append(held)
        size = sum(map(len, row))
        self._sizes.append(size)
        self._reward.append(self._rewards.setdefault(fields.reward, len(self._rewards)))
        self._held_bytes += size
        if len(self._columns["id"]) == CHUNK_ROWS or self._held_bytes > CHUNK_BYTES:
            self._flush()

    def finish(self) -> None:
        """Close the spool: sort the keys, merge equal tasks, and map the file.

        Of tasks that differ only in their reward, keep the one whose reward is first by name.
        """
        self._flush()
        self._writer.close()
        keys, ids = np.frombuffer(self._keys, f"S{KEY_BYTES}"), np.frombuffer(self._ids, "Q")
        parts, ranks = np.frombuffer(self._parts, "I"), {name: rank for rank, name in enumerate(sorted(self._rewards))}
        by_name = np.array([ranks[name] for name in self._rewards], dtype=np.uint32)
        order = np.lexsort((by_name[np.frombuffer(self._reward, "I")], ids, keys, parts))
        first = np.ones(len(order), dtype=bool)
        same = [held[order][1:] == held[order][:-1] for held in (parts, keys, ids)]
        first[1:] = ~np.logical_and.reduce(same)
        self.merged = np.bincount(parts[order[~first]], minlength=parts.max(initial=0) + 1)  # by part
        self.rows: Numbers = order[first]  # indices of the tasks: part by part, ordered by question hash
        self.keys, self.ids, self.parts = keys[self.rows], ids[self.rows], parts[self.rows]
        self.sizes = np.frombuffer(self._sizes, "I")[self.rows]
        self.table = pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()

    def tables(self, chosen: Numbers) -> Iterator[pa.Table]:
        """Yield tables of the chosen tasks, of at most CHUNK_ROWS and CHUNK_BYTES of text (unless one task is larger)."""
        start, size_bytes = 0, 0
        for at, position in enumerate(chosen):
            size = int(self.sizes[position])
            if at > start and (at - start == CHUNK_ROWS or size_bytes + size > CHUNK_BYTES):
                yield self.table.take(pa.array(self.rows[chosen[start:at]]))
                start, size_bytes = at, 0
            size_bytes += size
        if start < len(chosen):
            yield self.table.take(pa.array(self.rows[chosen[start:]]))

    def _flush(self) -> None:
        if self._columns["id"]:
            self._writer.write_batch(
                pa.record_batch([pa.array(held, pa.string()) for held in self._columns.values()], schema=SCHEMA)
            )
        self._columns = {name: [] for name in COLUMNS}
        self._held_bytes = 0


def order_key(question: str) -> bytes:
    """Return the hash by which questions are ordered and split, in hex. It ignores white space."""
    words = " ".join(question.split())
    return hashlib.sha256(f"shoal/tasks/{words}".encode()).hexdigest()[:KEY_BYTES].encode()


def content_id(fields: TaskFields) -> str:
    """Return a task's name: 16 hex digits of the hash of its content."""
    content = {"question": fields.question, "answer": fields.answer}
    content |= {name: held for name, held in (("tests", fields.tests), ("metadata", fields.metadata)) if held}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# --- the set ----------------------------------------------------------------------------------------------------------


class Built(BaseModel):
    """The record of a compiled task set, stored in its folder."""

    asked: str  # hash of the part of the config that determines the set
    digest: str  # of the set, which is the name of its manifest
    notes: list[str]  # for people: counts per source


@dataclass
class Portion:
    """One source while it is compiled: positions into the spool."""

    source: SourceSection
    schemas: list[str]
    left_out: Counter[str]
    train: Numbers
    heldout: Numbers
    merged: int
    ambiguous: int  # tasks with the question of another one
    dropped: int = 0  # training tasks whose question is held out


def compile_tasks(section: TaskSection, folder: Path) -> Built:
    """Build the set in `folder`, or reuse the existing one if it was built for the same section.

    Raises TasksNotFoundError.
    """
    asked = hashlib.sha256(section.model_dump_json(include={"sources", "heldout"}).encode()).hexdigest()
    built = read_built(folder)
    if built is None or built.asked != asked:
        folder.mkdir(parents=True, exist_ok=True)
        manifest, notes = _compile(section, TaskStore(folder))
        built = Built(asked=asked, digest=TaskStore(folder).put(manifest.encode()), notes=notes)
        _check_digest(section, built)
        write_file(folder / BUILT, built.model_dump_json().encode())
    _check_digest(section, built)
    return built


def build_tasks(config: Config, folder: Path) -> tuple[Config, list[str]]:
    """Build a pool's task set in its folder. Return the config with `tasks.digest`, and notes for people.

    A pool's task set never changes: another one for the same folder is refused. Raises ConfigError.
    """
    before = read_built(folder)
    section = config.tasks
    if before and not section.digest:
        section = section.model_copy(update={"digest": before.digest})
    try:
        built = compile_tasks(section, folder)
    except TasksNotFoundError as error:
        raise ConfigError(str(error)) from error
    section = section.model_copy(update={"digest": built.digest})
    return config.model_copy(update={"tasks": section}), built.notes


def _check_digest(section: TaskSection, built: Built) -> None:
    if section.digest and section.digest != built.digest:
        raise TasksNotFoundError(
            f"tasks.digest is {section.digest}, but the sources give {built.digest}: a file of tasks or rewards is another "
            "one than when this digest was made. Use the same files on every machine and for a whole run. To use the new "
            "files, start a new run with a config without tasks.digest"
        )


def read_built(folder: Path) -> Built | None:
    """Return the record that `compile_tasks` wrote, or None."""
    try:
        built = Built.model_validate_json((folder / BUILT).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    return built if (folder / built.digest).exists() else None


def _compile(section: TaskSection, store: TaskStore) -> tuple[TaskManifest, list[str]]:
    with tempfile.TemporaryDirectory(dir=store.folder, prefix=".spool-") as scratch:
        spool = Spool(Path(scratch) / "rows")
        readings = [_read(spool, number, source) for number, source in enumerate(section.sources)]
        spool.finish()
        shares = _shares([source.weight for source in section.sources], section.heldout)
        portions = [_split(spool, number, readings[number], share) for number, share in enumerate(shares)]
        heldout = np.sort(np.concatenate([portion.heldout for portion in portions]))
        # Sorted together, so that any first n are a mixture of sources, too.
        heldout = heldout[np.argsort(spool.keys[heldout], kind="stable")]
        for number, (portion, share) in enumerate(zip(portions, shares, strict=True)):
            held_out = np.isin(spool.keys[portion.train], spool.keys[heldout])  # in this source or another
            portion.train, portion.dropped = portion.train[~held_out], int(held_out.sum())
            _check_counts(portion, share)
            if portion.source.keep:
                portion.train = _kept(portion.source, spool.ids, portion.train, spool.parts // 2 == number)
        files = {name: store.put(data) for name, data in _own_files(section.sources).items()}
        manifest = TaskManifest(
            sources=[
                SourceTasks(
                    name=portion.source.label,
                    chunks=[store.write(table) for table in spool.tables(portion.train)],
                    train=len(portion.train),
                    heldout=len(portion.heldout),
                )
                for portion in portions
            ],
            heldout=[store.write(table) for table in spool.tables(heldout)],
            files=dict(sorted(files.items())),
        )
        return manifest, [_note(portion) for portion in portions]


# --- read and split -------------------------------------------------------------------------------------------------


def _read(spool: Spool, number: int, source: SourceSection) -> list[SourceReading]:
    """Read a source's splits into parts 2 * number and, of `heldout_split`, 2 * number + 1."""
    readings = [SourceReading(source, split) for split in (source.split, source.heldout_split) if split]
    for part, reading in enumerate(readings, start=2 * number):
        for fields in reading:
            spool.add(part, source.label, fields)
    return readings


def _split(spool: Spool, number: int, readings: Sequence[SourceReading], share: int) -> Portion:
    first, *others = readings
    start, middle, end = np.searchsorted(spool.parts, [2 * number, 2 * number + 1, 2 * number + 2])
    train, apart = np.arange(start, middle), np.arange(middle, end)
    keys = spool.keys[start:end]
    same = (keys[1:] == keys[:-1]) & (spool.parts[start:end][1:] == spool.parts[start:end][:-1])
    return Portion(
        first.source,
        first.schemas,
        sum((other.left_out for other in others), first.left_out),
        train if others else train[share:],
        apart[:share] if others else train[:share],
        merged=int(spool.merged[2 * number : 2 * number + 2].sum()),
        ambiguous=int(same.sum()),
    )


def _kept(source: SourceSection, all_ids: Numbers, train: Numbers, own: Numbers) -> Numbers:
    """Return the training tasks that the manifest of `shoal filter` keeps. `own`: which tasks are the source's."""
    try:
        listed = json.loads(Path(source.keep).expanduser().read_bytes())
        if listed["format"] != "shoal-filter-1":
            raise ValueError(f"its format is {listed['format']!r}")
        names = [str(name).rpartition("/") for name in listed["kept"]]
        ids = np.array([int(name, 16) for label, _, name in names if label == source.label], dtype=np.uint64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TasksNotFoundError(
            f"source {source.label}: keep = {source.keep!r} is not a manifest of `shoal filter` ({error})"
        ) from error
    missing = np.setdiff1d(ids, all_ids[own])
    if len(missing):
        raise TasksNotFoundError(
            f"source {source.label}: {len(missing)} of {len(ids)} tasks in {source.keep} are not in the source (first "
            f"{source.label}/{int(missing[0]):016x}); its rows have changed: filter it again"
        )
    train = train[np.isin(all_ids[train], ids)]
    if len(train) < MIN_TRAIN:
        raise TasksNotFoundError(
            f"source {source.label}: {source.keep} keeps {len(train)} training tasks, {MIN_TRAIN} are needed; widen the "
            "band of the filter"
        )
    return train


def _check_counts(portion: Portion, heldout: int) -> None:
    source = portion.source
    if len(portion.heldout) >= heldout and len(portion.train) >= MIN_TRAIN:
        return
    where = source.path or source.hub or source.generator
    hint = "; raise operand_max" if source.generator == "arithmetic" else ""
    raise TasksNotFoundError(
        f"source {source.label} ({where}) has {len(portion.train)} tasks to train on and {len(portion.heldout)} held out; "
        f"{MIN_TRAIN} and {heldout} are needed: lower tasks.heldout or add tasks{hint}{_aside(portion)}"
    )


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """Divide `total` into integer shares proportional to the weights.

    >>> _shares([1, 1, 2], 10)
    [2, 3, 5]
    """
    ends = [round(sum(weights[: n + 1]) / sum(weights) * total) for n in range(len(weights))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


# --- files of one's own, and notes -----------------------------------------------------------------------------------


def _own_files(sources: Sequence[SourceSection]) -> dict[str, bytes]:
    """Read the source files of user rewards and environments, "file.py:name". Return them by file name without folders."""
    files: dict[str, bytes] = {}
    for source in sources:
        rewards = [source.reward] if isinstance(source.reward, str) else list(source.reward)
        named = [*(("reward", name) for name in rewards), ("environment", source.environment)]
        for kind, name in named:
            if not is_own(name):
                continue
            path = Path(name.rpartition(":")[0])
            try:
                data = path.expanduser().read_bytes()
            except OSError as error:
                raise TasksNotFoundError(
                    f"source {source.label}: no {kind} file at {path}, from {Path.cwd()} ({error.strerror}); correct "
                    f"the source's {kind}"
                ) from error
            if len(data) > FILE_BYTES:
                raise TasksNotFoundError(f"{path} has {len(data) / 1e6:.1f} MB; the limit is 1 MB")
            if files.setdefault(path.name, data) != data:
                raise TasksNotFoundError(f"two files of your own are named {path.name}; rename one of them")
    return files


def _note(portion: Portion) -> str:
    """Summarise a source's rows in one line."""
    schemas = f" ({', '.join(portion.schemas)})" if portion.schemas else ""
    counts = f"{len(portion.train):,} tasks to train on, {len(portion.heldout):,} held out"
    return f"{portion.source.label}{schemas}: {counts}{_aside(portion)}"


def _aside(portion: Portion) -> str:
    counted = {
        "equal rows merged": portion.merged,
        "rows share their question with another row, but not the rest": portion.ambiguous,
        "training rows dropped because their question is held out": portion.dropped,
        **{f"rows left out: {reason}": count for reason, count in sorted(portion.left_out.items())},
    }
    return "".join(f"; {count:,} {what}" for what, count in counted.items() if count)

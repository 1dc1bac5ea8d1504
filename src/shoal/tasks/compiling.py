"""Compile the sources of a config into a task set on disk: merge duplicates, hold out tasks, write hashed chunks.

    read     the rows of each split of each source into a spool on disk
    split    hold out the tasks with the smallest question hashes, or those of `heldout_split`
    write    the training tasks of each source and all held-out tasks as chunks, then the manifest
    serve    the set for workers, in the folder PUBLIC: the training tasks without answers

Invariants: the same rows give the same task set, in any order and in any number of files. No question is both trained
on and held out. Memory holds one batch of rows as Python objects, and 48 bytes per row for sorting.
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
from pydantic import BaseModel, Field, ValidationError

from shoal.config import Config, ConfigError
from shoal.config.tasks import SourceSection, TaskSection
from shoal.errors import user_path
from shoal.files import write_file
from shoal.tasks.libraries import FILES
from shoal.tasks.sources.reading import SourceReader
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
from shoal.tasks.user_code import SERVED, file_name, is_user_code

Indices = np.ndarray
KEY_BYTES = 32
MIN_TRAIN = 16
BUILT = "built.json"
PUBLIC = "public"  # in a task set's folder: the files of the set for workers


class Spool:
    """All rows on disk, in reading order, and their sort keys in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer = pa.ipc.new_file(str(path), SCHEMA)
        self._columns: dict[str, list[str]] = {name: [] for name in COLUMNS}
        self._batch_bytes = 0
        self._keys, self._ids, self._sizes, self._parts = bytearray(), array("Q"), array("I"), array("I")
        self._reward_numbers: dict[str, int] = {}  # a number for each reward's name, in reading order
        self._rewards = array("I")  # the number of each row's reward

    def add(self, part: int, source: str, fields: TaskFields) -> None:
        """Add a row to a part, which is one split of one source. Tasks are sorted and merged within their part."""
        name = content_id(fields)
        self._keys += order_key(fields.question)
        self._ids.append(int(name, 16))
        self._parts.append(part)
        row = (f"{source}/{name}", fields.question, fields.answer, source, *astuple(fields)[2:])
        for column, text in zip(self._columns.values(), row, strict=True):
            column.append(text)
        size = sum(map(len, row))
        self._sizes.append(size)
        self._rewards.append(self._reward_numbers.setdefault(fields.reward, len(self._reward_numbers)))
        self._batch_bytes += size
        if len(self._columns["id"]) == CHUNK_ROWS or self._batch_bytes > CHUNK_BYTES:
            self._flush()

    def finish(self) -> None:
        """Close the spool: sort the keys, merge equal tasks, and map the file into memory.

        If tasks differ only in their reward, keep the one whose reward name sorts first.
        """
        self._flush()
        self._writer.close()
        keys, ids = np.frombuffer(self._keys, f"S{KEY_BYTES}"), np.frombuffer(self._ids, "Q")
        parts, names = np.frombuffer(self._parts, "I"), sorted(self._reward_numbers)
        ranks = np.array([names.index(name) for name in self._reward_numbers], dtype=np.uint32)
        order = np.lexsort((ranks[np.frombuffer(self._rewards, "I")], ids, keys, parts))
        first = np.ones(len(order), dtype=bool)
        same = [column[order][1:] == column[order][:-1] for column in (parts, keys, ids)]
        first[1:] = ~np.logical_and.reduce(same)
        # How many rows of each part were merged into others.
        self.merged = np.bincount(parts[order[~first]], minlength=parts.max(initial=0) + 1)
        self.rows: Indices = order[first]  # row numbers of the tasks, sorted by part, then by question hash
        self.keys, self.ids, self.parts = keys[self.rows], ids[self.rows], parts[self.rows]
        self.sizes = np.frombuffer(self._sizes, "I")[self.rows]
        self.table = pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()

    def tables(self, chosen: Indices) -> Iterator[pa.Table]:
        """Yield the chosen tasks in tables of at most CHUNK_ROWS rows and CHUNK_BYTES; a single task may be larger."""
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
            columns = [pa.array(column, pa.string()) for column in self._columns.values()]
            self._writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
        self._columns = {name: [] for name in COLUMNS}
        self._batch_bytes = 0


def order_key(question: str) -> bytes:
    """Return a question's hash in hex, which decides its order and whether it is held out. White space is ignored."""
    words = " ".join(question.split())
    return hashlib.sha256(f"shoal/tasks/{words}".encode()).hexdigest()[:KEY_BYTES].encode()


def content_id(fields: TaskFields) -> str:
    """Return the id of a task within its source: 16 hex digits of the hash of its content."""
    content = {"question": fields.question, "answer": fields.answer}
    content |= {name: text for name, text in (("tests", fields.tests), ("metadata", fields.metadata)) if text}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# --- the set ----------------------------------------------------------------------------------------------------------


class Built(BaseModel):
    """The record of a compiled task set, stored in its folder."""

    config_hash: str = Field(alias="asked")  # hash of the config sections that determine the set
    digest: str  # SHA-256 of the manifest, which names the set
    public: str  # digest of the set for workers
    notes: list[str]  # readable counts per source


@dataclass
class Portion:
    """One source during compilation. `train` and `heldout` are positions in the spool."""

    source: SourceSection
    schemas: list[str]
    left_out: Counter[str]
    train: Indices
    heldout: Indices
    merged: int
    dropped: int = 0  # training tasks dropped because their question is held out


def compile_tasks(section: TaskSection, folder: Path) -> Built:
    """Build the set in `folder`, or reuse it if it was built for the same section. Raise TasksNotFoundError."""
    config_hash = hashlib.sha256(section.model_dump_json(include={"sources", "heldout"}).encode()).hexdigest()
    built = read_built(folder)
    is_new = built is None or built.config_hash != config_hash
    if built is None or is_new:
        (folder / PUBLIC).mkdir(parents=True, exist_ok=True)
        store, public = TaskStore(folder), TaskStore(folder / PUBLIC)
        manifest, notes = _compile(section, store)
        served = _serve(section, manifest, store, public)
        digests = [at.put(each.model_dump_json().encode()) for at, each in ((store, manifest), (public, served))]
        built = Built(asked=config_hash, digest=digests[0], public=digests[1], notes=notes)
    if section.digest and section.digest != built.digest:
        raise TasksNotFoundError(
            f"tasks.digest is {section.digest}, but the sources give {built.digest}: a file of tasks or rewards has "
            "changed; use the same files on every machine for a whole run, or start a new run without tasks.digest"
        )
    if is_new:
        write_file(folder / BUILT, built.model_dump_json(by_alias=True).encode())
    return built


def build_tasks(config: Config, folder: Path) -> tuple[Config, list[str]]:
    """Build a pool's task set in its folder. Return the config with `tasks.digest`, and readable notes.

    Raise ConfigError if the set cannot be built. Also raise it if the folder holds a different set, because a pool's
    task set never changes.
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
        # Sort across sources, so that the first n held-out tasks come from all sources.
        heldout = heldout[np.argsort(spool.keys[heldout], kind="stable")]
        for number, (portion, share) in enumerate(zip(portions, shares, strict=True)):
            held_out = np.isin(spool.keys[portion.train], spool.keys[heldout])  # in this source or another
            portion.train, portion.dropped = portion.train[~held_out], int(held_out.sum())
            _check_counts(portion, share)
            if portion.source.keep:
                portion.train = _keep(portion.source, spool.ids, portion.train, spool.parts // 2 == number)
        files = {name: store.put(data) for name, data in _user_files(section.sources).items()}
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


def _serve(section: TaskSection, manifest: TaskManifest, store: TaskStore, public: TaskStore) -> TaskManifest:
    """Write the set for workers to `public`: what they need for prompts and for environments, in other files.

    It has the same training tasks with only question and source, and metadata for a user's environment. It has no ids,
    because an id is also a hash of the answer, from which a short answer can be guessed.
    """
    sources = []
    for source, settings in zip(manifest.sources, section.sources, strict=True):
        shown = SERVED if is_user_code(settings.environment) else SERVED[:2]
        if len(shown) == len(SERVED) and settings.generator in FILES:
            raise TasksNotFoundError(
                f"source {source.name}: an environment of your own sees metadata, from which workers could make the "
                f"answers of {settings.generator}; leave it out, or write the tasks to a file"
            )
        chunks = []
        for batch in map(store.batch, source.chunks):
            empty = pa.array([""] * len(batch))
            columns = {name: batch[name] if name in shown else empty for name in COLUMNS}
            chunks.append(public.write(pa.table(columns, schema=SCHEMA)))
        sources.append(source.model_copy(update={"chunks": chunks, "heldout": 0}))
    environments = {file_name(settings.environment) for settings in section.sources}
    code = {name: store.read(sha256, FILE_BYTES) for name, sha256 in manifest.files.items() if name in environments}
    files = {name: public.put(data) for name, data in code.items()}
    return TaskManifest(sources=sources, heldout=[], files=files)


# --- read and split -------------------------------------------------------------------------------------------------


def _read(spool: Spool, number: int, source: SourceSection) -> list[SourceReader]:
    """Read a source's `split` into part 2 * number of the spool, and its `heldout_split` into part 2 * number + 1."""
    readers = [SourceReader(source, split) for split in (source.split, source.heldout_split) if split]
    for part, reader in enumerate(readers, start=2 * number):
        for fields in reader:
            spool.add(part, source.label, fields)
    return readers


def _split(spool: Spool, number: int, readers: Sequence[SourceReader], share: int) -> Portion:
    first, *others = readers
    start, middle, end = np.searchsorted(spool.parts, [2 * number, 2 * number + 1, 2 * number + 2])
    train, separate = np.arange(start, middle), np.arange(middle, end)
    return Portion(
        first.source,
        first.schemas,
        sum((other.left_out for other in others), first.left_out),
        train if others else train[share:],
        separate[:share] if others else train[:share],
        merged=int(spool.merged[2 * number : 2 * number + 2].sum()),
    )


def _keep(source: SourceSection, all_ids: Indices, train: Indices, of_source: Indices) -> Indices:
    """Return the training tasks that the manifest of `shoal filter` keeps. `of_source`: mask of the source's tasks."""
    try:
        manifest = json.loads(user_path(source.keep).read_bytes())
        if manifest["format"] != "shoal-filter-1":
            raise ValueError(f"its format is {manifest['format']!r}")
        names = [str(name).rpartition("/") for name in manifest["kept"]]
        ids = np.array([int(name, 16) for label, _, name in names if label == source.label], dtype=np.uint64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TasksNotFoundError(
            f"source {source.label}: keep = {source.keep!r} is not a manifest of `shoal filter` ({error})"
        ) from error
    missing = np.setdiff1d(ids, all_ids[of_source])
    if len(missing):
        raise TasksNotFoundError(
            f"source {source.label}: {len(missing)} of {len(ids)} tasks in {source.keep} are not in the source, for example "
            f"{source.label}/{int(missing[0]):016x}; the rows of the source have changed: filter it again"
        )
    train = train[np.isin(all_ids[train], ids)]
    if len(train) < MIN_TRAIN:
        raise TasksNotFoundError(
            f"source {source.label}: {source.keep} keeps {len(train)} training tasks, but {MIN_TRAIN} are needed; widen "
            "the band of the filter"
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
        f"{MIN_TRAIN} and {heldout} are needed: lower tasks.heldout or add tasks{hint}{_counts(portion)}"
    )


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """Divide `total` into integer shares proportional to the weights.

    >>> _shares([1, 1, 2], 10)
    [2, 3, 5]
    """
    ends = [round(sum(weights[: n + 1]) / sum(weights) * total) for n in range(len(weights))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


# --- user files, and notes --------------------------------------------------------------------------------------------


def _user_files(sources: Sequence[SourceSection]) -> dict[str, bytes]:
    """Return the files of user rewards and environments ("file.py:name") by file name. Raise TasksNotFoundError.

    No file may hold both, because workers get the files of environments.
    """
    files: dict[str, bytes] = {}
    kinds: dict[str, str] = {}
    for source in sources:
        rewards = [source.reward] if isinstance(source.reward, str) else list(source.reward)
        for kind, name in [*(("reward", name) for name in rewards), ("environment", source.environment)]:
            if not is_user_code(name):
                continue
            path = user_path(name.rpartition(":")[0])
            try:
                data = path.read_bytes()
            except OSError as error:
                raise TasksNotFoundError(
                    f"source {source.label}: no {kind} file at {path} (current folder: {Path.cwd()}; "
                    f"{error.strerror}); correct the source's {kind}"
                ) from error
            if len(data) > FILE_BYTES:
                raise TasksNotFoundError(f"{path} has {len(data) / 1e6:.1f} MB; the limit is 1 MB")
            if files.setdefault(path.name, data) != data:
                raise TasksNotFoundError(f"two reward or environment files are named {path.name}; rename one of them")
            if kinds.setdefault(path.name, kind) != kind:
                raise TasksNotFoundError(
                    f"{path} holds a reward and an environment, but workers get the files of environments and may not "
                    "see rewards: move one of them to another file"
                )
    return files


def _note(portion: Portion) -> str:
    """Summarize a source's rows in one line."""
    schemas = f" ({', '.join(portion.schemas)})" if portion.schemas else ""
    counts = f"{len(portion.train):,} tasks to train on, {len(portion.heldout):,} held out"
    return f"{portion.source.label}{schemas}: {counts}{_counts(portion)}"


def _counts(portion: Portion) -> str:
    """Return the counts of merged, dropped and left-out rows, to append to a message."""
    counts = {
        "equal rows merged": portion.merged,
        "training rows dropped because their question is held out": portion.dropped,
        **{f"rows left out: {reason}": count for reason, count in sorted(portion.left_out.items())},
    }
    return "".join(f"; {count:,} {what}" for what, count in counts.items() if count)

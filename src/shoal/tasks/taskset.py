"""The task set of a run, read from disk: a manifest in JSON that names chunks of tasks in Arrow's IPC format.

Invariants: every file is named by its SHA-256, which is verified when it is read. A task's id is a hash of its content,
and `digest` is the hash of the manifest, so two machines with the same digest draw the same tasks. Opening a set reads
only its manifest; a chunk is fetched and memory-mapped when one of its tasks is first needed.
"""

import bisect
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, overload

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.config.tasks import TaskSection
from shoal.errors import first_problem
from shoal.files import new_file
from shoal.tasks.task import Task, TasksNotFoundError

FORMAT = "shoal-tasks-1"
CHUNK_ROWS = 4096
CHUNK_BYTES = 32 << 20  # characters in a chunk, unless a single task has more
MAX_CHUNK_BYTES = 256 << 20  # of a chunk's file, because a character has up to 4 bytes, and a task up to 64 MB of tests
MAX_CHUNKS = 1 << 18  # of one source, or of all held-out tasks
MAX_SOURCES = MAX_FILES = 1024
MANIFEST_BYTES = 64 << 20
FILE_BYTES = 1 << 20  # size of the source file of a user reward or environment
OPEN_CHUNKS = 64  # chunks mapped at the same time; each keeps a file open
COLUMNS = [field.name for field in fields(Task)]
SCHEMA = pa.schema([pa.field(name, pa.string(), nullable=False) for name in COLUMNS])

Fetch = Callable[[str, int], bytes]  # (SHA-256, size limit in bytes) -> the file
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Field(ge=0, le=2**40)


class TaskPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TaskChunk(TaskPart):
    sha256: Sha256
    rows: int = Field(ge=1, le=CHUNK_ROWS)
    size_bytes: int = Field(ge=1, le=MAX_CHUNK_BYTES)


class SourceTasks(TaskPart):
    """The training tasks of one source."""

    name: str
    chunks: list[TaskChunk] = Field(max_length=MAX_CHUNKS)
    train: int = Count
    heldout: int = Count  # number of held-out tasks from this source


class TaskManifest(TaskPart):
    format: str = Field(default=FORMAT, pattern=f"^{FORMAT}$")
    sources: list[SourceTasks] = Field(min_length=1, max_length=MAX_SOURCES)
    heldout: list[TaskChunk] = Field(max_length=MAX_CHUNKS)  # of all sources
    files: dict[str, Sha256] = Field(default={}, max_length=MAX_FILES)  # of user code, by name

    @classmethod
    def decode(cls, data: bytes) -> "TaskManifest":
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise TasksNotFoundError(
                f"the manifest of the task set is invalid in this version of Shoal: {first_problem(error)}"
            ) from error


class TaskStore:
    """A folder of files named by their SHA-256. `fetch` gets missing files."""

    def __init__(self, folder: Path, fetch: Fetch | None = None) -> None:
        self.folder = folder
        self.fetch = fetch
        self.verified: set[str] = set()
        self.mapped: OrderedDict[str, pa.RecordBatch] = OrderedDict()

    def put(self, data: bytes | memoryview) -> str:
        sha256 = hashlib.sha256(data).hexdigest()
        if not (self.folder / sha256).exists():
            with new_file(self.folder / sha256) as file:
                file.write(0, data)
                file.commit(durable=self.fetch is None)  # a fetched file that is damaged is fetched again
        self.verified.add(sha256)
        return sha256

    def path(self, sha256: str, max_bytes: int) -> Path:
        """Return a file's path. Fetch the file if it is missing, and verify its hash once. Raise TasksNotFoundError.

        `max_bytes`: the largest size to fetch.
        """
        path = self.folder / sha256
        if sha256 in self.verified:
            return path
        if path.exists():
            if _hash(path) == sha256:
                self.verified.add(sha256)
                return path
            if self.fetch is None:
                raise TasksNotFoundError(f"{path} was changed: its content has a different hash; delete {self.folder}")
            path.unlink()
        if self.fetch is None:
            raise TasksNotFoundError(f"no task data {sha256} in {self.folder}; prepare the tasks again")
        if self.put(self.fetch(sha256, max_bytes)) != sha256:
            raise TasksNotFoundError(f"the coordinator served task data {sha256} with a different hash; try again")
        return path

    def read(self, sha256: str, max_bytes: int) -> bytes:
        return self.path(sha256, max_bytes).read_bytes()

    def batch(self, chunk: TaskChunk) -> pa.RecordBatch:
        """Return a chunk's tasks, mapped into memory. Raise TasksNotFoundError."""
        if chunk.sha256 in self.mapped:
            self.mapped.move_to_end(chunk.sha256)
            return self.mapped[chunk.sha256]
        path = self.path(chunk.sha256, chunk.size_bytes)
        if path.stat().st_size != chunk.size_bytes:
            raise TasksNotFoundError(
                f"task data {chunk.sha256} has {path.stat().st_size} bytes, but its manifest says {chunk.size_bytes}"
            )
        batch = _mapped(path)
        if batch.schema != SCHEMA or batch.num_rows != chunk.rows:
            raise TasksNotFoundError(f"task data {chunk.sha256} does not hold {chunk.rows} tasks in the known format")
        self.mapped[chunk.sha256] = batch
        if len(self.mapped) > OPEN_CHUNKS:
            self.mapped.popitem(last=False)
        return batch

    def write(self, table: pa.Table) -> TaskChunk:
        """Store a table of at most CHUNK_ROWS tasks as one chunk. Equal tables give equal bytes."""
        [batch] = pa.table([column.combine_chunks() for column in table.columns], schema=SCHEMA).to_batches()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, SCHEMA, options=pa.ipc.IpcWriteOptions(compression=None)) as writer:
            writer.write_batch(batch)
        data = sink.getvalue()
        return TaskChunk(sha256=self.put(memoryview(data)), rows=batch.num_rows, size_bytes=data.size)


class TaskView(Sequence[Task]):
    """The tasks of a list of chunks, as a sequence. Tasks are built on access and not kept."""

    def __init__(self, store: TaskStore, chunks: Sequence[TaskChunk]) -> None:
        self.store = store
        self.chunks = chunks
        self.ends = list(itertools.accumulate(chunk.rows for chunk in chunks))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    @overload
    def __getitem__(self, at: int) -> Task: ...
    @overload
    def __getitem__(self, at: slice) -> list[Task]: ...
    def __getitem__(self, at: int | slice) -> Task | list[Task]:
        if isinstance(at, slice):
            return [self[n] for n in range(*at.indices(len(self)))]
        at = at + len(self) if at < 0 else at
        if not 0 <= at < len(self):
            raise IndexError(f"task {at} of {len(self)}")
        number = bisect.bisect_right(self.ends, at)
        batch = self.store.batch(self.chunks[number])
        row = at - (self.ends[number - 1] if number else 0)
        return Task(*(column[row].as_py() for column in batch.columns))


def _mapped(path: Path) -> pa.RecordBatch:
    """Map a chunk and validate it fully, because Arrow would follow a hostile file's offsets out of bounds."""
    try:
        with pa.memory_map(str(path)) as source:
            batch = pa.ipc.open_file(source).get_batch(0)
        batch.validate(full=True)
        return batch
    except (pa.ArrowException, OSError) as error:
        raise TasksNotFoundError(f"{path} is not readable as task data ({error}); delete it") from error


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class TaskSet:
    """The task set whose manifest has the hash `digest`.

    Raise TasksNotFoundError if it is not in `store`, or if its sources are not those of `section`.
    """

    def __init__(self, section: TaskSection, digest: str, store: TaskStore, notes: Sequence[str] = ()) -> None:
        self.digest = digest
        self.store = store
        self.notes = notes  # a readable line per source, with counts of its rows
        self.manifest = TaskManifest.decode(store.read(digest, MANIFEST_BYTES))
        names = [source.name for source in self.manifest.sources]
        if names != [source.label for source in section.sources]:
            raise TasksNotFoundError(
                f"task set {digest} has the sources {', '.join(names)}, which are not the config's"
            )
        self.train = TaskView(store, [chunk for source in self.manifest.sources for chunk in source.chunks])
        self.heldout = TaskView(store, self.manifest.heldout)
        self.weights = [source.weight for source in section.sources]
        # Where each source's tasks end in `train`.
        self.ends = list(itertools.accumulate(source.train for source in self.manifest.sources))

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """Source files of user rewards and environments, by file name."""
        return {name: self.store.read(sha256, FILE_BYTES) for name, sha256 in self.manifest.files.items()}

    @property
    def samples(self) -> list[Task]:
        """The first training task of each source."""
        return [self.train[start] for start in [0, *self.ends[:-1]]]

    def pick(self, drawn: bytes) -> int:
        """Return the index of a training task. `drawn`: 32 random bytes that choose a source by weight, then a task."""
        total = sum(self.weights)
        point = int.from_bytes(drawn[16:24], "big") / 2**64 * total
        at = min(bisect.bisect_right(list(itertools.accumulate(self.weights)), point), len(self.weights) - 1)
        start = self.ends[at - 1] if at else 0
        return start + int.from_bytes(drawn[:8], "big") % (self.ends[at] - start)

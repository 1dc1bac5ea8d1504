"""The rows of one split on disk in reading order, with the keys to sort them by in memory: 32 bytes a row.

Invariant: no more than one batch of rows is held as Python objects. Called by `compiling`.
"""

import hashlib
import json
from array import array
from pathlib import Path

import numpy as np
import pyarrow as pa

from shoal.tasks.compiled.table import CHUNK_BYTES, CHUNK_ROWS, COLUMNS, SCHEMA
from shoal.tasks.sources.fields import Fields

Numbers = np.ndarray


class Spool:
    def __init__(self, path: Path, source: str) -> None:
        self.path = path
        self.source = source
        self._writer = pa.ipc.new_file(str(path), SCHEMA)
        self._columns: dict[str, list[str]] = {name: [] for name in COLUMNS}
        self._held_bytes = 0
        self._high, self._low, self._ids, self._sizes = array("Q"), array("Q"), array("Q"), array("I")
        self._rewards: dict[str, int] = {}  # by name, in reading order
        self._reward = array("I")  # of each row, as its number there

    def add(self, fields: Fields) -> None:
        key, name = order_key(fields.question), content_id(fields)
        self._high.append(int.from_bytes(key[:8], "big"))
        self._low.append(int.from_bytes(key[8:], "big"))
        self._ids.append(int(name, 16))
        row = (
            f"{self.source}/{name}",
            fields.question,
            fields.answer,
            self.source,
            fields.tests,
            fields.metadata,
            fields.reward,
        )
        for values, held in zip(self._columns.values(), row, strict=True):
            values.append(held)
        size = sum(map(len, row))
        self._sizes.append(size)
        self._reward.append(self._rewards.setdefault(fields.reward, len(self._rewards)))
        self._held_bytes += size
        if len(self._columns["id"]) == CHUNK_ROWS or self._held_bytes > CHUNK_BYTES:
            self._flush()

    def finish(self) -> None:
        """No more rows: sort the keys, map the file. Equal tasks are one; `merged` counts the others.

        Of tasks that differ in nothing but their reward, the one whose reward is first by name remains.
        """
        self._flush()
        self._writer.close()
        high, low, ids, sizes = (
            np.frombuffer(one, dtype=one.typecode) for one in (self._high, self._low, self._ids, self._sizes)
        )
        ranks = {name: rank for rank, name in enumerate(sorted(self._rewards))}
        by_name = np.array([ranks[name] for name in self._rewards], dtype=np.uint32)
        order = np.lexsort((by_name[np.frombuffer(self._reward, dtype="I")], ids, low, high))
        first = np.ones(len(order), dtype=bool)
        first[1:] = (
            np.diff(high[order]).astype(bool) | np.diff(low[order]).astype(bool) | np.diff(ids[order]).astype(bool)
        )
        self.rows: Numbers = order[first]  # where to find the tasks, in the order of their questions' hash
        self.high, self.low, self.ids, self.sizes = (one[self.rows] for one in (high, low, ids, sizes))
        self.merged = len(order) - len(self.rows)
        same = (np.diff(self.high) == 0) & (np.diff(self.low) == 0)
        self.ambiguous = int(same.sum())  # tasks whose question is that of the one before, with another answer
        self.table = pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()

    def _flush(self) -> None:
        if self._columns["id"]:
            self._writer.write_batch(
                pa.record_batch([pa.array(held, pa.string()) for held in self._columns.values()], schema=SCHEMA)
            )
        self._columns = {name: [] for name in COLUMNS}
        self._held_bytes = 0


def order_key(question: str) -> bytes:
    """Where a question stands, and on which side of the split: a hash of its words, spaces apart."""
    words = " ".join(question.split())
    return hashlib.sha256(f"shoal/tasks/{words}".encode()).digest()[:16]


def content_id(fields: Fields) -> str:
    """A task's name: 16 hex digits of the hash of its content."""
    content = {"question": fields.question, "answer": fields.answer}
    content |= {name: held for name, held in (("tests", fields.tests), ("metadata", fields.metadata)) if held}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

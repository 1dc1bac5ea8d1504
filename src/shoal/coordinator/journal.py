"""The run's work as JSON lines: settled submissions, published versions, downloads of weights; and work in progress.

    submission   its worker, validator, step, version, state, times, verdict; the groups of an accepted one
    version      its publication time and size
    download     node, version, start, end and size

Invariant: each submission, version and download gets one line, after its last change. No line contains a key or a nonce,
except the part of its worker's key in a submission's id. `serving` appends the lines to `work.jsonl`.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from shoal.ledger.connection import Connection

PAGE = 500  # lines of each kind per call
MAX_IN_PROGRESS = 200  # oldest unsettled submissions
COLUMNS = (
    *("submission", "worker", "validator", "step", "version", "groups", "state", "reason", "full", "tokens"),
    *("assigned_s", "uploaded_s", "lease_s", "judged_s"),
)
SELECT = """SELECT s.seq, w.name, v.name, s.step, s.version, s.groups, s.state, s.reason, s.full_check, s.tokens,
    s.assigned_s, s.uploaded_s, s.lease_s, s.judged_s, s.id, s.verdict, s.accepted_hash, s.file_hash
    FROM submissions s JOIN nodes w ON w.key = s.worker LEFT JOIN nodes v ON v.key = s.validator"""
GROUP = ("reward", "useful", "tokens", "task", "source", "target")
OPEN = "('open', 'uploaded', 'validating')"  # `submissions.UNSETTLED`
Line = dict[str, Any]


class Journal:
    def __init__(self, connection: Connection, written: Iterable[Line]) -> None:
        """`written`: the lines of earlier starts."""
        self.connection = connection
        self._written: set[int] = set()  # submissions above the floor
        self._floor = 0  # all submissions up to this one are written
        self._version, self._download = -1, 0
        for line in written:
            match line["kind"]:
                case "submission":
                    self._written.add(line["submission"])
                case "version":
                    self._version = max(self._version, line["version"])
                case "download":
                    self._download = max(self._download, line["number"])

    def new(self) -> list[Line]:
        """Return the next lines; none if all are written."""
        return [*self._submissions(), *self._versions(), *self._downloads()]

    def under_way(self) -> list[Line]:
        """Return the oldest unsettled submissions, in the form of settled ones."""
        rows = self.connection.rows(f"{SELECT} WHERE s.state IN {OPEN} ORDER BY s.seq LIMIT ?", MAX_IN_PROGRESS)
        return [dict(zip(COLUMNS, row, strict=False)) for row in rows]

    def _submissions(self) -> list[Line]:
        oldest = self.connection.value(f"SELECT min(seq) FROM submissions WHERE state IN {OPEN}")
        settled = self.connection.rows(
            f"SELECT seq FROM submissions WHERE seq > ? AND state NOT IN {OPEN} ORDER BY seq", self._floor
        )
        new = [seq for (seq,) in settled if seq not in self._written][:PAGE]
        if not new:
            return []
        self._written |= set(new)
        pending = [seq for (seq,) in settled if seq not in self._written]
        first = min([new[-1] + 1, *pending[:1], *([] if oldest is None else [oldest])])  # all before it are written
        self._floor = max(self._floor, first - 1)
        self._written = {seq for seq in self._written if seq > self._floor}
        marks = ", ".join("?" * len(new))
        return [
            self._line(row) for row in self.connection.rows(f"{SELECT} WHERE s.seq IN ({marks}) ORDER BY s.seq", *new)
        ]

    def _line(self, row: Sequence[Any]) -> Line:
        line: Line = {"kind": "submission"} | dict(zip(COLUMNS, row, strict=False))
        id_, verdict, accepted_hash, file_hash = row[len(COLUMNS) :]
        line |= {"id": id_, "file": accepted_hash if line["state"] == "accepted" else file_hash}
        fields = json.loads(verdict) if verdict else {}
        line |= {name: fields.get(name) for name in ("detail", "evidence", "replay") if fields.get(name) is not None}
        if line["state"] == "accepted":
            columns = ", ".join(GROUP)
            groups = self.connection.rows(f"SELECT {columns} FROM groups WHERE submission = ? ORDER BY grp", id_)
            line["group_list"] = [dict(zip(GROUP, group, strict=True)) | {"useful": bool(group[1])} for group in groups]
        return line

    def _versions(self) -> list[Line]:
        rows = self.connection.rows(
            "SELECT version, published_s, size_bytes FROM policies WHERE version > ? ORDER BY version LIMIT ?",
            *(self._version, PAGE),
        )
        self._version = rows[-1][0] if rows else self._version
        return [{"kind": "version", "version": v, "at_s": at_s, "bytes": size} for v, at_s, size in rows]

    def _downloads(self) -> list[Line]:
        rows = self.connection.rows(
            "SELECT t.seq, n.name, n.role, t.version, t.from_s, t.to_s, t.size_bytes FROM transfers t"
            " JOIN nodes n ON n.key = t.node WHERE t.seq > ? ORDER BY t.seq LIMIT ?",
            *(self._download, PAGE),
        )
        self._download = rows[-1][0] if rows else self._download
        names = ("number", "node", "role", "version", "from_s", "to_s", "bytes")
        return [{"kind": "download"} | dict(zip(names, row, strict=True)) for row in rows]

"""The coordinator process: open a run's folder, serve it while recording metrics and work, then seal the database.

`work.jsonl` has one line for each of these:
    submission   once it is settled: worker, validator, step, version, state, times, reason; its groups if accepted
    version      publication time and size
    download     of weights by a node: version, start, end and size

Invariants: a `ServedRun` is the only writer of the run's metrics: it writes their files and feeds the tracker. No line of
`work.jsonl` contains a key or a nonce, and each line is written once, even across restarts.
"""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shoal.config import Config, check_resumed
from shoal.config.config import LOOPBACK
from shoal.coordinator.database import config_text, record_start, seal
from shoal.coordinator.folder import KEY
from shoal.coordinator.http.routes import Coordinator
from shoal.coordinator.pool import TABLE_NAMES
from shoal.files import read_json
from shoal.ledger.connection import Connection
from shoal.protocol.history import Status
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Address
from shoal.protocol.server import MAX_CONNECTIONS, listen
from shoal.shardcast.server import url_of
from shoal.watch.record import Line, RunRecord, RunState
from shoal.watch.summary import CURVE, SUMMARY, write_report
from shoal.watch.trackers import open_tracker

POLL_S = 0.1
CONNECTIONS = 256  # per address
RECORD_S = 2.0
STATE_SHARE = 0.02  # largest share of the coordinator's time spent on the state file
PAGE = 500  # lines of each kind per call of `WorkLog.new`
MAX_IN_PROGRESS = 200  # number of unsettled submissions shown, oldest first
COLUMNS = (
    *("submission", "worker", "validator", "step", "version", "groups", "state", "reason", "full", "tokens"),
    *("assigned_s", "uploaded_s", "lease_s", "judged_s"),
)
SELECT = """SELECT s.seq, w.name, v.name, s.step, s.version, s.groups, s.state, s.reason, s.full_check, s.tokens,
    s.assigned_s, s.uploaded_s, s.lease_s, s.judged_s, s.id, s.verdict
    FROM submissions s JOIN nodes w ON w.key = s.worker LEFT JOIN nodes v ON v.key = s.validator"""
GROUP = ("reward", "useful", "tokens", "task", "source", "target")
OPEN = "('open', 'uploaded', 'validating')"  # `submissions.UNSETTLED`

log = logging.getLogger(__name__)


class ServedRun:
    def __init__(
        self,
        config: Config,
        run: str,
        folder: Path,
        *,
        record_to: Path | None = None,
        reports: bool = True,
    ) -> None:
        """Open the run. Its metrics go to `record_to` (default: `folder`).

        `reports`: write a summary and a picture there, too, once the run has finished. Raise TrackerError, PoolError,
        LedgerError, database errors, ConfigError if the run cannot be continued with this config, and InviteError if the
        published invite is not this run's.
        """
        identity = Identity.load_or_create(folder / KEY)
        self.folder = folder
        self.coordinator = Coordinator(config, run, identity, folder)
        for entry in [*self.coordinator.pool.db.ledger.entries(kind="started")][-1:]:
            check_resumed(json.loads(entry.body)["config"], config)
        self.coordinator.published_invite()
        self.reports = reports
        self.record = RunRecord(record_to or folder, self.coordinator.pool.notices.append)
        self.record.tracker = open_tracker(record_to.name if record_to else run, self.record.folder, config)
        self.work = WorkLog(self.coordinator.pool.db.connection, self.record.work())
        self._state_due_s = 0.0
        self._catch_up()
        record_start(self.coordinator.pool.db, run, identity.public, config)
        self.record.write_state(self._state())

    async def live(self, stop: threading.Event) -> None:
        """Record metrics until `stop`. Raise errors that end the run: DatabaseLostError, OSError of a full disk."""
        settlement = self.coordinator.settlement
        settling = asyncio.create_task(settlement.run()) if settlement else None
        recorded_s = 0.0
        try:
            while not stop.is_set():
                await asyncio.sleep(POLL_S)
                if settling and settling.done():
                    settling.result()  # raises the task's error
                if time.monotonic() - recorded_s >= RECORD_S:
                    self.coordinator.nonces.check()
                    self.coordinator.pool.judgement.close_waiting()
                    await self._take_record()
                    recorded_s = time.monotonic()
        finally:
            if settling:
                settling.cancel()

    def close(self) -> None:
        """After the server has stopped: settle, write the final files, and seal. Raise OSError or DatabaseFullError."""
        try:
            if self.coordinator.settlement:
                self.coordinator.settlement.finish()
            self._catch_up()
            if self._report_is_due():  # the run ended right before the stop
                self._report(self.coordinator.status())
            self.record.write_state(self._state(ended=True))
            seal(self.coordinator.pool.db, TABLE_NAMES)
        finally:
            self.record.close()

    async def _take_record(self) -> None:
        """Write new metrics in a thread, because a tracker may block while it waits for its server."""
        pool, record = self.coordinator.pool, self.record
        entries, work = pool.db.history.after(record.history.cursor), self.work.new()
        state, start_s = None, time.monotonic()
        if start_s >= self._state_due_s:
            state = self._state()
            self._state_due_s = time.monotonic() + (time.monotonic() - start_s) / STATE_SHARE
        await asyncio.to_thread(record.write, entries, work, state)
        if self._report_is_due():
            self._catch_up()
            await asyncio.to_thread(self._report, self.coordinator.status())

    def _report_is_due(self) -> bool:
        return self.reports and self.coordinator.pool.db.is_finished(self.coordinator.config.run.steps)

    def _report(self, status: Status) -> None:
        """Write the finished run's summary and picture, unless they were written before a restart."""
        self.reports = False
        record, config = self.record, self.coordinator.config
        path = record.folder / SUMMARY
        if path.exists() and read_json(path)["steps"] >= status.trained:
            return
        summary = write_report(record.folder, config=config, status=status, history=record.history)
        steps, place = summary["steps"], record.folder
        log.info("the run has finished its %d steps; %s and %s are in %s", steps, SUMMARY, CURVE, place)

    def _state(self, *, ended: bool = False) -> RunState:
        coordinator = self.coordinator
        return RunState(
            status=coordinator.status(),
            config=config_text(coordinator.config),
            under_way=self.work.in_progress(),
            ended=ended,
        )

    def _catch_up(self) -> None:
        while self.record.add_history(self.coordinator.pool.db.history.after(self.record.history.cursor)):
            pass
        while work := self.work.new():
            self.record.add_work(work)


class WorkLog:
    """The lines of `work.jsonl`, read from the pool's tables."""

    def __init__(self, connection: Connection, written: Iterable[Line]) -> None:
        """`written`: the lines written before a restart."""
        self.connection = connection
        self._written: set[int] = set()  # numbers of the written submissions above `_floor`
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

    def in_progress(self) -> list[Line]:
        """Return the oldest unsettled submissions, with the same fields as settled ones."""
        rows = self.connection.rows(f"{SELECT} WHERE s.state IN {OPEN} ORDER BY s.seq LIMIT ?", MAX_IN_PROGRESS)
        return [dict(zip(COLUMNS, row, strict=False)) for row in rows]

    def _submissions(self) -> list[Line]:
        oldest = self.connection.value(f"SELECT min(seq) FROM submissions WHERE state IN {OPEN}")
        settled = self.connection.rows(
            f"SELECT seq FROM submissions WHERE seq > ? AND state NOT IN {OPEN} ORDER BY seq", self._floor
        )
        new = [seq for (seq,) in settled if seq not in self._written]
        new, later = new[:PAGE], new[PAGE : PAGE + 1]
        if not new:
            return []
        self._floor = min([new[-1] + 1, *later, *([] if oldest is None else [oldest])]) - 1
        self._written = {seq for seq in self._written.union(new) if seq > self._floor}
        marks = ", ".join("?" * len(new))
        return [
            self._line(row) for row in self.connection.rows(f"{SELECT} WHERE s.seq IN ({marks}) ORDER BY s.seq", *new)
        ]

    def _line(self, row: Sequence[Any]) -> Line:
        *values, id_, verdict = row
        line: Line = {"kind": "submission"} | dict(zip(COLUMNS, values, strict=True))
        if verdict is not None:
            line["detail"] = json.loads(verdict)["detail"]
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


def serve_forever(
    config: Config,
    run: str,
    folder: Path,
    port: int,
    stop: threading.Event,
    *,
    record_to: Path | None = None,
    url: str = "",
    reports: bool = True,
) -> None:
    """Serve one run until `stop`.

    `url`: the address that nodes are given (default: the listening address). `ServedRun` describes the other arguments.
    Raise OSError if the port is taken, TrackerError if the tracker does not start, DatabaseLostError.
    """
    served = ServedRun(config, run, folder, record_to=record_to, reports=reports)
    try:
        asyncio.run(_serve(served, port, stop, url))
    finally:
        served.close()


async def _serve(served: ServedRun, port: int, stop: threading.Event, url: str) -> None:
    """Listen and record until `stop`.

    On loopback, only the total number of connections is limited, because all nodes behind a proxy share its address.
    Each key is still limited after its signature is checked: `Pace.in_progress` serves at most AT_ONCE of its requests
    at a time. Idle connections do not count towards this limit, but the listener closes them after `Patience.idle_s`.
    It closes a stranger's connection after answering.
    """
    coordinator, section = served.coordinator, served.coordinator.config.coordinator
    per_address = MAX_CONNECTIONS if section.host in LOOPBACK else CONNECTIONS
    runner, bound = await listen(coordinator.app(), section.host, port, per_address=per_address)
    try:
        address = Address(url=url or url_of(section.host, bound), run=coordinator.run)
        coordinator.pool.members.coordinator_url = address.url
        coordinator.front.names = {urlsplit(address.url).hostname or ""}
        address.write(served.folder)
        log.info("run %s: listening at %s, key %s", coordinator.run, address.url, coordinator.identity.public)
        await served.live(stop)
    finally:
        await runner.cleanup()

"""The coordinator process: open a run's folder, serve it while recording metrics, then seal the database.

The folder contains its key, databases and store, and its URL in `coordinator.json`, which `shoal pool invite` reads.
Invariant: a `ServedRun` is the only writer of the run's metrics: it writes their files and feeds the tracker.
"""

import asyncio
import json
import logging
import threading
import time
from pathlib import Path

from shoal.config import Config
from shoal.config.config import LOOPBACK
from shoal.coordinator.database import config_text, record_start, seal
from shoal.coordinator.http.routes import Coordinator
from shoal.coordinator.journal import Journal
from shoal.coordinator.pool import TABLE_NAMES
from shoal.coordinator.state import KEY
from shoal.protocol.history import Status
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Address
from shoal.protocol.server import MAX_CONNECTIONS, listen
from shoal.shardcast.server import url_of
from shoal.watch.record import RunRecord, RunState
from shoal.watch.summary import CURVE, SUMMARY, write_report
from shoal.watch.trackers import open_tracker

POLL_S = 0.1
CONNECTIONS = 256  # per address
RECORD_S = 2.0
STATE_SHARE = 0.02  # largest share of the coordinator's time spent on the state file

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

        `reports`: when the run has finished, write summary and picture there too. Raise TrackerError, PoolError,
        LedgerError, InviteError if the published invite is not this run's, and database errors.
        """
        identity = Identity.load_or_create(folder / KEY)
        self.folder = folder
        self.coordinator = Coordinator(config, run, identity, folder)
        self.coordinator.published_invite()
        self.reports = reports
        self.record = RunRecord(record_to or folder, self.coordinator.pool.notices.append)
        self.record.tracker = open_tracker(record_to.name if record_to else run, self.record.folder, config)
        self.journal = Journal(self.coordinator.pool.db.connection, self.record.work())
        self._state_due_s = 0.0
        self._catch_up()
        record_start(self.coordinator.pool.db, run, identity.public, config)
        self.record.write_state(self._state())

    async def live(self, stop: threading.Event) -> None:
        """Record metrics until `stop`. Raise what ends the run: DatabaseLostError, OSError of a full disk."""
        settlement = self.coordinator.settlement
        settling = asyncio.create_task(settlement.run()) if settlement else None
        recorded_s = 0.0
        try:
            while not stop.is_set():
                await asyncio.sleep(POLL_S)
                if settling and settling.done():
                    settling.result()  # raises its error
                if time.monotonic() - recorded_s >= RECORD_S:
                    await self._take_record()
                    recorded_s = time.monotonic()
        finally:
            if settling:
                settling.cancel()

    def close(self) -> None:
        """Settle, write final files and seal, after the server stopped. Raise OSError, DatabaseFullError of a full disk."""
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
        """Write new metrics in a thread, because a tracker may block on its own server."""
        pool, record = self.coordinator.pool, self.record
        entries, work = pool.db.history.after(record.history.cursor), self.journal.new()
        state, start_s = None, time.monotonic()
        if start_s >= self._state_due_s:
            state = self._state()
            self._state_due_s = time.monotonic() + (time.monotonic() - start_s) / STATE_SHARE
        await asyncio.to_thread(record.keep, entries, work, state)
        if self._report_is_due():
            self._catch_up()
            await asyncio.to_thread(self._report, self.coordinator.status())

    def _report_is_due(self) -> bool:
        return self.reports and self.coordinator.pool.db.is_finished(self.coordinator.config.run.steps)

    def _report(self, status: Status) -> None:
        """Write the finished run's summary and picture, unless an earlier start wrote them."""
        self.reports = False
        record, config = self.record, self.coordinator.config
        path = record.folder / SUMMARY
        if path.exists() and json.loads(path.read_text())["steps"] >= status.trained:
            return
        summary = write_report(record.folder, config=config, status=status, history=record.history)
        steps, place = summary["steps"], record.folder
        log.info("the run has finished its %d steps; %s and %s are in %s", steps, SUMMARY, CURVE, place)

    def _state(self, *, ended: bool = False) -> RunState:
        coordinator = self.coordinator
        return RunState(
            status=coordinator.status(),
            config=config_text(coordinator.config),
            under_way=self.journal.under_way(),
            ended=ended,
        )

    def _catch_up(self) -> None:
        while self.record.take(self.coordinator.pool.db.history.after(self.record.history.cursor)):
            pass
        while work := self.journal.new():
            self.record.add_work(work)


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

    `url`: the address for nodes (default: where it listens). Others: see `ServedRun`. Raise OSError if the port is taken,
    TrackerError if the tracker does not start, DatabaseLostError.
    """
    served = ServedRun(config, run, folder, record_to=record_to, reports=reports)
    try:
        asyncio.run(_serve(served, port, stop, url))
    finally:
        served.close()


async def _serve(served: ServedRun, port: int, stop: threading.Event, url: str) -> None:
    coordinator, section = served.coordinator, served.coordinator.config.coordinator
    # A coordinator on loopback is reached from its own machine, for example through a proxy with all nodes' connections.
    per_address = MAX_CONNECTIONS if section.host in LOOPBACK else CONNECTIONS
    runner, bound = await listen(coordinator.app(), section.host, port, per_address=per_address)
    try:
        address = Address(url=url or url_of(section.host, bound), run=coordinator.run)
        address.write(served.folder)
        log.info("run %s: listening at %s, key %s", coordinator.run, address.url, coordinator.identity.public)
        await served.live(stop)
    finally:
        await runner.cleanup()

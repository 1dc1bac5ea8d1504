"""One run in a coordinator's process: opened from its folder, kept on record while it is served, sealed at its end.

Invariant: it is the one owner of the run's metrics: it writes their files and feeds the tracker. It shares nothing with
another run of the same process. Called by `service` for one run and by `sharing` for several.
"""

import asyncio
import json
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import Config
from shoal.coordinator.http.routes import Coordinator
from shoal.coordinator.state.seal import seal, start
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Status
from shoal.protocol.server import Front
from shoal.tracking.record import Record
from shoal.tracking.report import CURVE, SUMMARY, write_report
from shoal.tracking.trackers import open_tracker

if TYPE_CHECKING:
    from shoal.coordinator.state.lead import Lead

POLL_S = 0.1
RECORD_S = 2.0
KEY = "identity.pem"

log = logging.getLogger(__name__)


class ServedRun:
    def __init__(
        self,
        config: Config,
        run: str,
        folder: Path,
        *,
        front: Front | None = None,
        lead: "Lead | None" = None,
        record_to: Path | None = None,
        reports: bool = True,
    ) -> None:
        """Open the run. Its metrics are kept in `record_to` (default: `folder`). `front`: of the listener.

        `reports`: when the run has finished, write summary and picture there too. Raises TrackerError, PoolError,
        LedgerError, and what the database raises.
        """
        identity = Identity.load_or_create(folder / KEY)
        self.folder = folder
        self.coordinator = Coordinator(config, run, identity, folder, lead=lead, front=front)
        self.lead = lead
        self.reports = reports
        self.record = Record(record_to or folder, self.coordinator.pool.notices.append)
        self.record.tracker = open_tracker(record_to.name if record_to else run, self.record.folder, config)
        self._catch_up()
        start(self.coordinator.pool.db, run, identity.public, config)

    async def live(self, stop: threading.Event) -> None:
        """Keep the record until `stop`. Raises what ends this run: DatabaseLostError, OSError of a full disk."""
        settlement = self.coordinator.settlement
        settling = asyncio.create_task(settlement.run()) if settlement else None
        recorded_s = 0.0
        try:
            while not stop.is_set():
                await asyncio.sleep(POLL_S)
                if settling and settling.done():
                    settling.result()  # raises what ended it
                if self.lead:
                    self.lead.live_on()
                if time.monotonic() - recorded_s >= RECORD_S:
                    await self._take_record()
                    recorded_s = time.monotonic()
        finally:
            if settling:
                settling.cancel()

    def close(self) -> None:
        """The run's last words, once nobody is answered any more. Raises OSError, DatabaseFullError of a full disk."""
        try:
            if self.lead is None or not self.lead.is_lost:
                if self.coordinator.settlement:
                    self.coordinator.settlement.finish()
                self._catch_up()
                if self._report_is_due():  # it was stopped right after the end
                    self._report(self.coordinator.pool.status())
                seal(self.coordinator.pool.db)
        finally:
            self.record.close()

    async def _take_record(self) -> None:
        """In a thread: a tracker may wait for its own server, and members must not."""
        pool, record = self.coordinator.pool, self.record
        await asyncio.to_thread(record.take, pool.history.after(record.history.cursor))
        if self._report_is_due():
            self._catch_up()
            await asyncio.to_thread(self._report, pool.status())

    def _report_is_due(self) -> bool:
        return self.reports and self.coordinator.pool.db.is_finished(self.coordinator.config.run.steps)

    def _report(self, status: Status) -> None:
        self.reports = False
        _report(self.coordinator.config, status, self.record)

    def _catch_up(self) -> None:
        while self.record.take(self.coordinator.pool.history.after(self.record.history.cursor)):
            pass


def _report(config: Config, status: Status, record: Record) -> None:
    """Write the finished run's summary and picture, unless they are there from an earlier start."""
    path = record.folder / SUMMARY
    if path.exists() and json.loads(path.read_text())["steps"] >= status.trained:
        return
    wall_s = status.now_s - status.started_s
    summary = write_report(record.folder, config=config, status=status, history=record.history, wall_s=wall_s)
    log.info("the run has finished its %d steps; %s and %s are in %s", summary["steps"], SUMMARY, CURVE, record.folder)

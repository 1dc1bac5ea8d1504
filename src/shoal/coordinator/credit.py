"""Credit for accepted submissions, in tokens; members' stakes; and the settlement of both on a chain.

    pending     once the submission is accepted
    credited    once its worker has passed `validator.escrow_checks` full checks of later submissions, or once the run's
                last step is trained. Submissions accepted after that step are credited at once
    forfeited   when its worker is slashed or dismissed while the credit is pending

All credit is escrowed, even that of checked submissions. So a liar always risks at least the credit of `escrow_checks`
honest submissions, even right after it earned trust. docs/trust.md calculates why that suffices.

    offered     stake that a stranger has deposited; enough of it lets the stranger join
    at_risk     stake that slashing a member would take

Invariants: a submission's credit leaves `pending` only once. One transaction holds this change, the event that causes
it, and the ledger entry. Credited tokens are never taken back. A stake that its owner can still withdraw at once counts
only as offered, and earns no task. Only a stranger that joins by stake waits for a chain. Accepted work enters the
ledger first. `Settlement` then sends the entries in order and retries, even after a restart, until the chain accepts
them.
Left out: what a token is worth; chain reorganisations; a chain that makes blocks more slowly than the pool makes entries.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, Protocol

from shoal.config import Config
from shoal.coordinator.database import Database, PoolError
from shoal.coordinator.nodes import TIMEOUT_S
from shoal.ledger.chain import Entry, LedgerError
from shoal.ledger.evm import KINDS, settle, unsettled
from shoal.ledger.stakes import LedgerStakes
from shoal.protocol.messages import LARGEST, Booking
from shoal.protocol.pace import Rates

if TYPE_CHECKING:
    from shoal.ledger.evm import EvmStakes

POLL_S = 2.0  # between two reads of stakes on a chain
MAX_PAUSE_S = 60.0
BATCH_ENTRIES = 16  # entries settled between two reads of stakes
MAX_STRANGERS = 8  # strangers that may wait for the chain at the same time
READS_PER_S = 1.0  # reads for strangers at one address, with a burst of 10 s
READ_KEPT_S = 5.0  # a stranger's stake is not read again within this time
FINISH_S = 5.0

log = logging.getLogger(__name__)


class Escrow:
    """The only writer of the columns `tokens` and `credit` of accepted submissions."""

    def __init__(self, db: Database, config: Config) -> None:
        self.db = db
        self.config = config

    def accepted(self, worker: str, submission: str, tokens: int) -> None:
        """Escrow the credit of an accepted submission. Release the credit that this worker's later checks now cover.

        After the run's last step no more work follows, so `close` releases it.
        """
        self.db.connection.change(
            "UPDATE submissions SET tokens = ?, credit = 'pending' WHERE id = ?", tokens, submission
        )
        if self.db.is_trained(self.config.run.steps):
            return
        covered = self.db.connection.rows(  # submissions followed by at least `escrow_checks` accepted full checks
            "SELECT id, tokens FROM submissions WHERE worker = ? AND credit = 'pending' AND seq <"
            " (SELECT seq FROM submissions WHERE worker = ? AND state = 'accepted' AND full_check"
            " ORDER BY seq DESC LIMIT 1 OFFSET ?) ORDER BY seq",
            *(worker, worker, self.config.validator.escrow_checks - 1),
        )
        self._settle(worker, "credited", covered)

    def forfeit(self, worker: str) -> None:
        """Forfeit all of a worker's pending credit."""
        self._settle(worker, "forfeited", self._pending(worker))

    def close(self, doubted: Collection[str]) -> None:
        """Release all pending credit, because the run assigns no more work, except of the `doubted` workers."""
        waiting = "SELECT DISTINCT worker FROM submissions WHERE credit = 'pending' ORDER BY worker"
        for (worker,) in self.db.connection.rows(waiting):
            if worker in doubted:
                continue
            self._settle(worker, "credited", self._pending(worker))

    def pending_of(self, worker: str) -> tuple[int, int]:
        """Count a worker's submissions with pending credit, and the groups in them."""
        count, groups = self.db.connection.row(
            "SELECT count(*), coalesce(sum(groups), 0) FROM submissions WHERE worker = ? AND credit = 'pending'", worker
        )
        return int(count), int(groups)

    def tokens_by_credit(self) -> dict[tuple[str, str], int]:
        """Return total tokens by worker and state of credit: pending, credited or forfeited."""
        rows = self.db.connection.rows(
            "SELECT worker, credit, sum(tokens) FROM submissions WHERE credit != '' GROUP BY worker, credit"
        )
        return {(worker, credit): tokens for worker, credit, tokens in rows}

    def _pending(self, worker: str) -> list[tuple[str, int]]:
        return self.db.connection.rows(
            "SELECT id, tokens FROM submissions WHERE worker = ? AND credit = 'pending' ORDER BY seq", worker
        )

    def _settle(self, worker: str, credit: Literal["credited", "forfeited"], pending: list[tuple[str, int]]) -> None:
        if not pending:
            return
        for submission, _ in pending:
            self.db.connection.change("UPDATE submissions SET credit = ? WHERE id = ?", credit, submission)
        submissions, tokens = [submission for submission, _ in pending], sum(tokens for _, tokens in pending)
        self.db.ledger.append(credit, {"worker": worker, "submissions": submissions, "tokens": tokens})


class StakeView(Protocol):
    def offered(self, key: str) -> int: ...
    def at_risk(self, key: str) -> int: ...


class BookedStakes:
    """Stakes in the pool's own ledger, where the operator books payments."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.accounts = LedgerStakes(db.ledger, db.clock)

    def offered(self, key: str) -> int:
        return self.accounts.deposited(key) or self.at_risk(key)

    def at_risk(self, key: str) -> int:
        account = self.accounts.account(key)
        return account.stake if account else 0

    def book(self, booking: Booking) -> None:
        """Book a payment to or from the operator. Raise PoolError if the accounts forbid it."""
        try:
            with self.db.transaction():
                self._book(booking)
        except LedgerError as error:
            raise PoolError(str(error)) from error

    def _book(self, booking: Booking) -> None:
        accounts, key = self.accounts, booking.key
        joined = accounts.account(key) is not None
        match booking.kind:
            case "stake":
                (accounts.stake if joined else accounts.deposit)(key, booking.amount)
            case "unstake":
                accounts.unstake(key, booking.amount)
            case "withdraw":
                (accounts.withdraw if joined else accounts.reclaim)(key)


class ChainStakes:
    """Stakes as `Settlement` last read them from the contract, so that no heartbeat waits for a chain."""

    def __init__(self) -> None:
        self.offers: dict[str, int] = {}
        self.members: dict[str, int] = {}

    def offered(self, key: str) -> int:
        return self.offers.get(key, 0)

    def at_risk(self, key: str) -> int:
        return self.members.get(key, 0)


class Settlement:
    """Settles ledger entries in a contract (`[ledger]`), and reads stakes back. It runs on the event loop. Only its own
    threads talk to the chain; they never use the database."""

    def __init__(self, config: Config, db: Database, stakes: ChainStakes, notify: Callable[[str], None]) -> None:
        self.config = config
        self.db = db
        self.stakes = stakes
        self.notify = notify
        self.waiting: deque[Entry] = deque()
        self._read_seq = 0  # the newest ledger entry that was read
        self._last_notice = ""
        self._stored: dict[str, int] = {}  # stakes in the table of nodes
        self._skipped_settled = False  # whether entries settled before this start were removed from `waiting`
        self._contracts: dict[str, EvmStakes] = {}  # by the thread that uses it
        self._reads: dict[str, tuple[float, asyncio.Future[int]]] = {}  # by stranger: when it began, and the stake
        self._read_rates = Rates(READS_PER_S)  # by address
        self._settle_thread, self._read_thread = (ThreadPoolExecutor(1, f"chain-{name}") for name in ("settle", "read"))

    # --- on the event loop -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Settle until cancelled; report an error and retry. Raise LedgerError for a wrong contract or key."""
        pause_s = POLL_S
        while True:
            try:
                members = self._queue_entries()
                await asyncio.get_running_loop().run_in_executor(self._settle_thread, self._settle_batch, members)
                self._store_stakes()
            except Exception as error:
                lasting = isinstance(error, LedgerError) and not error.restart_helps
                if lasting and "settle" not in self._contracts:
                    raise
                self._report(error)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            else:
                self._report(None)
                pause_s = POLL_S
            await asyncio.sleep(0 if self.waiting and pause_s == POLL_S else pause_s)

    async def read_offered(self, key: str, payer: str, address: str) -> None:
        """Read the stake that a stranger has deposited. The requests of READ_KEPT_S share one read, even if it fails.

        Raise PoolError (503: retry) if the chain is unreachable or too many strangers are joining.
        """
        now_s = time.monotonic()
        self._reads = {
            each: (began_s, read)
            for each, (began_s, read) in self._reads.items()
            if now_s - began_s < READ_KEPT_S or not read.done()
        }
        if key not in self._reads:
            waiting = sum(not read.done() for _, read in self._reads.values())
            if waiting >= MAX_STRANGERS or self._read_rates.wait_s(address, now_s) > 0:
                raise PoolError("too many nodes are joining at the same time; try again", 503)
            self._read_rates.charge(address, 1, now_s)
            loop = asyncio.get_running_loop()
            self._reads[key] = now_s, loop.run_in_executor(self._read_thread, self._read_offered, key, payer)
        try:
            offered = await asyncio.shield(self._reads[key][1])
        except LedgerError as error:
            raise PoolError(f"cannot read stakes from the chain: {error}", 503) from error
        self.stakes.offers = {key: offered}  # only this request needs it

    def finish(self) -> None:
        """Settle waiting entries for at most FINISH_S. The next start settles the rest."""
        deadline_s = time.monotonic() + FINISH_S
        members = self._queue_entries()
        try:
            while self.waiting or not self._skipped_settled:
                self._settle_thread.submit(self._settle_batch, members).result(max(0.1, deadline_s - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - reported; the next start tries it again
            log.warning(
                "%d ledger entries are not yet on the chain (%s); the next start settles them, or run "
                "`shoal pool stake settle`",
                len(self.waiting),
                error,
            )
        for thread in (self._settle_thread, self._read_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    def _queue_entries(self) -> list[str]:
        """Queue the ledger's new entries. Return the keys whose stake must be read."""
        for entry in self.db.ledger.entries(self._read_seq):
            self._read_seq = entry.seq
            if entry.kind in KINDS:
                self.waiting.append(entry)
        since_s = self.db.clock() - 2 * TIMEOUT_S
        nodes = self.db.nodes.all()
        return [
            node.key
            for node in nodes
            if node.joined_by_stake and (node.staked > 0 if node.evicted else node.seen_s >= since_s)
        ]

    def _store_stakes(self) -> None:
        """Write changed stakes at risk into the table of nodes, for the dashboard. A column holds at most LARGEST."""
        for key, amount in self.stakes.members.items():
            if self._stored.get(key) != amount:
                self.db.nodes.set(key, staked=min(amount, LARGEST))
                self._stored[key] = amount

    def _report(self, error: Exception | None) -> None:
        """Log and show the chain's state whenever it changes."""
        text = f"{error}; accepted work waits in the ledger and is settled later" if error else ""
        if text and text != self._last_notice:
            log.warning("%s", text, exc_info=None if isinstance(error, LedgerError) else error)
            self.notify(text)
        if self._last_notice and not text:
            log.info("the chain accepts entries again")
            self.notify("the chain accepts entries again")
        self._last_notice = text

    # --- in its own threads ------------------------------------------------------------------------------------------

    def _contract(self, thread: str) -> "EvmStakes":
        from shoal.ledger.evm import open_contract

        section = self.config.ledger
        if thread not in self._contracts:
            self._contracts[thread] = open_contract(
                section.rpc, section.contract, section.key_file, operates=thread == "settle"
            )
        return self._contracts[thread]

    def _settle_batch(self, members: list[str]) -> None:
        contract = self._contract("settle")
        if not self._skipped_settled:
            waiting = list(self.waiting)  # a copy, because `finish` may append entries meanwhile
            for _ in range(len(waiting) - len(unsettled(waiting, contract))):
                self.waiting.popleft()
            self._skipped_settled = True
        for _ in range(min(BATCH_ENTRIES, len(self.waiting))):
            entry = self.waiting[0]
            if settle(entry, contract):
                log.info("settled entry %d, %s", entry.seq, entry.kind)
            self.waiting.popleft()
        accounts = {key: contract.account(key) for key in members}
        self.stakes.members = {key: account.stake if account else 0 for key, account in accounts.items()}

    def _read_offered(self, key: str, payer: str) -> int:
        contract = self._contract("read")
        account = contract.account(key)
        if account is not None:
            return account.stake
        return contract.deposited(key, payer) if payer else 0

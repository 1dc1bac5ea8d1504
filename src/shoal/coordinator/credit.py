"""Credit: what an accepted submission earns, in tokens, and when; what is staked on members; and both on a chain.

    pending     from its acceptance on
    credited    once its worker has passed `validator.escrow_checks` whole prefills of later submissions, or once the run's
                last step is trained: at once, if it is accepted after that
    forfeited   when its worker is slashed or dismissed before that

All credit waits, that of checked submissions too. So whoever lies always risks at least the pay of `escrow_checks` honest
submissions, also right after it earned trust; docs/trust.md calculates why that suffices.

    offered     what a stranger has ready: enough lets it in      at_risk   what a member loses if it is slashed now

Invariants: a submission's credit changes once, in the transaction of the verdict that causes it, with one entry of the
ledger. What is credited stays. A stake that its owner can still take back at once is only offered, and earns no task. Only a
stranger who asks to join by stake waits for a chain: accepted work is in the ledger first, and `Settlement` sends entries in
order, again where the chain does not take them yet, also after a restart.
Left out: what a token is worth; reorganisations of a chain; one that makes blocks more slowly than the pool makes entries.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, Protocol

from shoal.config import Config
from shoal.coordinator.database import Database, PoolError
from shoal.coordinator.nodes import TIMEOUT_S
from shoal.ledger.chain import Entry, LedgerError
from shoal.ledger.evm import KINDS, settle, unsettled
from shoal.ledger.stakes import LedgerStakes
from shoal.protocol.messages import Booking

if TYPE_CHECKING:
    from shoal.ledger.evm import EvmStakes

LOOK_S = 2.0  # between two looks at stakes on a chain
LONGEST_PAUSE_S = 60.0
AT_ONCE = 16  # entries between two looks at stakes
MOST_STRANGERS = 8  # that wait for the chain at once
FINISH_S = 5.0

log = logging.getLogger(__name__)


class Escrow:
    """The columns `tokens` and `credit` of accepted submissions. Nothing else writes them."""

    def __init__(self, db: Database, config: Config) -> None:
        self.db = db
        self.config = config

    def accepted(self, worker: str, submission: str, tokens: int) -> None:
        """Hold the credit of an accepted submission; release what this worker's checks have covered by now.

        After the run's last step no more work comes that could cover it: nothing waits any more.
        """
        self.db.connection.change(
            "UPDATE submissions SET tokens = ?, credit = 'pending' WHERE id = ?", tokens, submission
        )
        if self.db.is_trained(self.config.run.steps):
            self._settle(worker, "credited", self._pending(worker))
            return
        covered = self.db.connection.rows(  # with at least `escrow_checks` accepted full checks after it
            "SELECT id, tokens FROM submissions WHERE worker = ? AND credit = 'pending' AND seq <"
            " (SELECT seq FROM submissions WHERE worker = ? AND state = 'accepted' AND full_check"
            " ORDER BY seq DESC LIMIT 1 OFFSET ?) ORDER BY seq",
            *(worker, worker, self.config.validator.escrow_checks - 1),
        )
        self._settle(worker, "credited", covered)

    def forfeit(self, worker: str) -> None:
        """Take all that waits."""
        self._settle(worker, "forfeited", self._pending(worker))

    def close(self) -> None:
        """Release all that waits: no more work will be asked for, so nobody has anything left to lie about."""
        waiting = "SELECT DISTINCT worker FROM submissions WHERE credit = 'pending' ORDER BY worker"
        for (worker,) in self.db.connection.rows(waiting):
            self._settle(worker, "credited", self._pending(worker))

    def waiting_of(self, worker: str) -> tuple[int, int]:
        """How many accepted submissions wait for their credit, and how many groups these hold."""
        count, groups = self.db.connection.row(
            "SELECT count(*), coalesce(sum(groups), 0) FROM submissions WHERE worker = ? AND credit = 'pending'", worker
        )
        return int(count), int(groups)

    def tokens_by_credit(self) -> dict[tuple[str, str], int]:
        """Summed tokens by worker and what became of their credit: pending, credited or forfeited."""
        rows = self.db.connection.rows(
            "SELECT worker, credit, sum(tokens) FROM submissions WHERE credit != '' GROUP BY worker, credit"
        )
        return {(worker, credit): tokens for worker, credit, tokens in rows}

    def _pending(self, worker: str) -> list[tuple[str, int]]:
        return self.db.connection.rows(
            "SELECT id, tokens FROM submissions WHERE worker = ? AND credit = 'pending' ORDER BY seq", worker
        )

    def _settle(self, worker: str, credit: Literal["credited", "forfeited"], found: list[tuple[str, int]]) -> None:
        if not found:
            return
        for submission, _ in found:
            self.db.connection.change("UPDATE submissions SET credit = ? WHERE id = ?", credit, submission)
        submissions, tokens = [submission for submission, _ in found], sum(tokens for _, tokens in found)
        self.db.ledger.append(credit, {"worker": worker, "submissions": submissions, "tokens": tokens})


class StakeView(Protocol):
    def offered(self, key: str) -> int: ...
    def at_risk(self, key: str) -> int: ...


class BookedStakes:
    """In the pool's own ledger, where the operator books what it was paid."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.accounts = LedgerStakes(db.ledger, db.clock)

    def offered(self, key: str) -> int:
        return self.accounts.deposited(key) or self.at_risk(key)

    def at_risk(self, key: str) -> int:
        account = self.accounts.account(key)
        return account.stake if account else 0

    def book(self, booking: Booking) -> None:
        """What the operator was paid, or pays back. Raises PoolError for what the accounts forbid."""
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
    """What `Settlement` read in the contract last: no heartbeat may wait for a chain."""

    def __init__(self) -> None:
        self.offers: dict[str, int] = {}
        self.members: dict[str, int] = {}

    def offered(self, key: str) -> int:
        return self.offers.get(key, 0)

    def at_risk(self, key: str) -> int:
        return self.members.get(key, 0)


class Settlement:
    """Settles the ledger in a contract (`[ledger]`), and reads stakes back. On the event loop; only its own threads speak to
    the chain, and they touch no database."""

    def __init__(self, config: Config, db: Database, stakes: ChainStakes, notify: Callable[[str], None]) -> None:
        self.config = config
        self.db = db
        self.stakes = stakes
        self.notify = notify
        self.waiting: deque[Entry] = deque()
        self._read = 0  # the newest entry of the ledger that was looked at
        self._told = ""
        self._knows_contract = False  # what is settled already was asked
        self._contracts: dict[str, EvmStakes] = {}  # by the thread that uses it
        self._strangers = 0
        self._settling, self._looking = (ThreadPoolExecutor(1, f"chain-{name}") for name in ("settle", "look"))

    # --- on the event loop -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until it is cancelled. Raises LedgerError if the contract is another one; not if the chain is away."""
        pause_s = LOOK_S
        while True:
            members, before = self._news(), self.stakes.members
            try:
                await asyncio.get_running_loop().run_in_executor(self._settling, self._work, members)
            except LedgerError as error:
                if "settle" not in self._contracts and not error.restart_helps:
                    raise
                self._tell(error)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self._tell(None)
                self._keep(before)
                pause_s = LOOK_S
            await asyncio.sleep(0 if self.waiting and pause_s == LOOK_S else pause_s)

    async def look(self, key: str, payer: str) -> None:
        """Read what a stranger has ready. Raises PoolError (503: ask again) if the chain does not say."""
        if self._strangers >= MOST_STRANGERS:
            raise PoolError("many ask to join at once; wait", 503)
        self._strangers += 1
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._looking, self._offer, key, payer)
        except LedgerError as error:
            raise PoolError(f"cannot see stakes: {error}", 503) from error
        finally:
            self._strangers -= 1
        self.stakes.offers = {key: found}  # only this request asks for it

    def finish(self) -> None:
        """Settle what waits, for at most FINISH_S; what is left, the next start settles."""
        deadline_s = time.monotonic() + FINISH_S
        members = self._news()
        try:
            while self.waiting or not self._knows_contract:
                self._settling.submit(self._work, members).result(max(0.1, deadline_s - time.monotonic()))
        except (LedgerError, TimeoutError) as error:
            log.warning(
                "%d entries of the ledger are not on the chain (%s): the next start settles them, or `shoal pool stake "
                "settle`",
                len(self.waiting),
                error,
            )
        for thread in (self._settling, self._looking):
            thread.shutdown(wait=False, cancel_futures=True)

    def _news(self) -> list[str]:
        """Queue the ledger's new entries; the keys whose stake is to be read."""
        for entry in self.db.ledger.entries(self._read):
            self._read = entry.seq
            if entry.kind in KINDS:
                self.waiting.append(entry)
        since_s = self.db.clock() - 2 * TIMEOUT_S
        nodes = self.db.nodes.all()
        return [
            node.key
            for node in nodes
            if node.joined_by_stake and (node.staked > 0 if node.evicted else node.seen_s >= since_s)
        ]

    def _keep(self, before: Mapping[str, int]) -> None:
        """Write what members have at risk, where that changed, into the table of nodes: the dashboard reads it there."""
        for key, amount in self.stakes.members.items():
            if before.get(key) != amount:
                self.db.nodes.set(key, staked=amount)

    def _tell(self, error: LedgerError | None) -> None:
        """Once each time that the news changes."""
        text = f"{error}; accepted work waits in the ledger, and is settled later" if error else ""
        if text and text != self._told:
            log.warning("%s", text)
            self.notify(text)
        if self._told and not text:
            log.info("the chain takes entries again")
            self.notify("the chain takes entries again")
        self._told = text

    # --- in its own threads ------------------------------------------------------------------------------------------

    def _contract(self, thread: str) -> "EvmStakes":
        from shoal.ledger.evm import open_contract

        section = self.config.ledger
        if thread not in self._contracts:
            self._contracts[thread] = open_contract(
                section.rpc, section.contract, section.key_file, operates=thread == "settle"
            )
        return self._contracts[thread]

    def _work(self, members: list[str]) -> None:
        contract = self._contract("settle")
        if not self._knows_contract:
            self.waiting = deque(unsettled(self.waiting, contract))
            self._knows_contract = True
        for _ in range(min(AT_ONCE, len(self.waiting))):
            entry = self.waiting[0]
            if settle(entry, contract):
                log.info("settled entry %d, %s", entry.seq, entry.kind)
            self.waiting.popleft()
        found = {key: contract.account(key) for key in members}
        self.stakes.members = {key: account.stake if account else 0 for key, account in found.items()}

    def _offer(self, key: str, payer: str) -> int:
        contract = self._contract("look")
        account = contract.account(key)
        if account is not None:
            return account.stake
        return contract.deposited(key, payer) if payer else 0

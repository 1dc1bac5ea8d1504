"""The coordinator's side of a contract on a chain (`[ledger]`): settles the ledger there, and reads stakes back.

    ledger -> settle, entry by entry -> contract          contract -> stakes of members, every LOOK_S -> `ChainStakes`

Invariant: only a stranger who asks to join by stake waits for the chain. Accepted work is in the ledger first. Entries that
the chain does not accept yet are kept in order and sent again, and the operator gets a notice. After a restart the contract
is asked which entries it has, and the others are sent. Started and ended by `service`, on the event loop; only its own
threads speak to the chain, and they touch no database.
Left out: reorganisations; a chain that makes blocks more slowly than the pool makes entries falls behind.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from shoal.config import Config
from shoal.coordinator.credit.stakes import ChainStakes
from shoal.coordinator.state.database import Database, PoolError
from shoal.ledger.interface import Entry, LedgerError
from shoal.ledger.settle import KINDS, settle, unsettled

if TYPE_CHECKING:
    from shoal.ledger.evm.contract import EvmStakes

LOOK_S = 2.0
LONGEST_PAUSE_S = 60.0
AT_ONCE = 16  # entries between two looks at stakes
MOST_STRANGERS = 8  # that wait for the chain at once
FINISH_S = 5.0

log = logging.getLogger(__name__)


class Settlement:
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
                "%d entries of the ledger are not on the chain (%s): the next start settles them, or `shoal stake settle`",
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
        since_s = self.db.clock() - 2 * self.config.coordinator.node_timeout_s
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
                self.db.nodes.set_staked(key, amount)

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
        from shoal.ledger.evm.opening import open_contract

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

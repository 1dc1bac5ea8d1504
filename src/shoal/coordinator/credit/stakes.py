"""What is staked on members and on strangers who want to be, as admission asks it: in the ledger, or on a chain.

    offered   what a stranger has ready: enough lets it in         at_risk   what a member loses if it is slashed now

Invariant: a stake that its owner can still take back at once is only offered, and earns no task.
Called by `members`. `BookedStakes` reads the pool's own ledger, where the operator books what it was paid; `ChainStakes`
holds what `settlement` read in the contract last, because no heartbeat may wait for a chain.
"""

from typing import Protocol

from shoal.coordinator.state.database import Database, PoolError
from shoal.ledger.interface import LedgerError
from shoal.ledger.stakes import LedgerStakes
from shoal.protocol.messages import Booking


class StakeView(Protocol):
    def offered(self, key: str) -> int: ...
    def at_risk(self, key: str) -> int: ...


class BookedStakes:
    def __init__(self, db: Database) -> None:
        self.db = db
        self.accounts = LedgerStakes(db.ledger, db.clock)

    def offered(self, key: str) -> int:
        return self.accounts.deposited(key) or self.at_risk(key)

    def at_risk(self, key: str) -> int:
        account = self.accounts.account(key)
        return account.stake if account else 0

    def book(self, booking: Booking) -> None:
        """What the operator was paid, pays back, or decides. Raises PoolError for what the accounts forbid."""
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
            case "appeal":
                accounts.appeal(key, booking.work, booking.statement)
            case "grant" | "refuse":
                accounts.decide(booking.work, granted=booking.kind == "grant")


class ChainStakes:
    def __init__(self) -> None:
        self.offers: dict[str, int] = {}
        self.members: dict[str, int] = {}

    def offered(self, key: str) -> int:
        return self.offers.get(key, 0)

    def at_risk(self, key: str) -> int:
        return self.members.get(key, 0)

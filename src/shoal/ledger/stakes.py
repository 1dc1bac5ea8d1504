"""Accounts of a pool: who is registered, each member's stake and credit, and who was slashed.

    deposit    paid before registration; not at risk, can be reclaimed; registration turns it into stake
    register   once per key, with a role
    stake      at risk; unstaked stake stays at risk for UNSTAKE_S, then it can be withdrawn
    credit     once per piece of work, in tokens as the validators counted them
    slash      for one piece of work: the pool gets everything at risk; whoever slashes gets nothing

Two backends pass the same tests: `LedgerStakes` here, in the hash-chained signed ledger, and `EvmStakes`, a contract on an
EVM chain (`evm`). Keys are public keys in hex; `work` names a submission.
Invariant: deposits, stake, unstaked stake, the pool, and the amounts reclaimed and withdrawn add up to the amount paid
in. `Book` holds the rules; the contract has the same rules. A forbidden action changes nothing and raises LedgerError.
Left out: paying slashed stake out of the pool.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.ledger.chain import JSON, Entry, LedgerError
from shoal.ledger.table import Ledger

UNSTAKE_S = 7 * 86_400  # longer than it takes to detect a lie
EVENTS = ("deposited", "reclaimed", "registered", "staked", "unstaked", "withdrawn", "credited", "slashed")


@dataclass(frozen=True)
class Account:
    role: str
    stake: int = 0
    leaving: int = 0  # unstaked, and still at risk
    leaves_s: int = 0  # when `leaving` can be withdrawn
    credit: int = 0  # tokens


@dataclass(frozen=True)
class Event:
    kind: str  # one of EVENTS
    key: str
    work: str = ""  # submissions, separated by spaces; the role if kind is "registered"
    amount: int = 0  # stake, or tokens if kind is "credited"


@dataclass
class Book:
    """The accounts after a series of events, and the rules for the next event."""

    accounts: dict[str, Account] = field(default_factory=dict)
    slashed: set[str] = field(default_factory=set)  # work that somebody was slashed for
    paid: set[str] = field(default_factory=set)  # work that was credited
    deposits: dict[str, int] = field(default_factory=dict)
    pool: int = 0

    def apply(self, event: Event, time_s: int) -> None:
        """Apply an event. Raise LedgerError, without a change, if the rules forbid it."""
        if type(event.amount) is not int or event.amount < 0:
            raise LedgerError(f"the amount {str(event.amount)[:60]} is not a whole number of at least 0")
        getattr(self, f"_{event.kind}")(event, time_s)

    def _registered(self, event: Event, time_s: int) -> None:
        if event.key in self.accounts or not event.work:
            raise LedgerError(f"{event.key[:16]} is already registered, or has no role")
        self.accounts[event.key] = Account(event.work, stake=self.deposits.pop(event.key, 0))

    def _deposited(self, event: Event, time_s: int) -> None:
        _positive(event.amount)
        if event.key in self.accounts:
            raise LedgerError(f"{event.key[:16]} is already registered: stake instead of depositing")
        self.deposits[event.key] = self.deposits.get(event.key, 0) + event.amount

    def _reclaimed(self, event: Event, time_s: int) -> None:
        if event.key not in self.deposits:
            raise LedgerError(f"nothing is deposited on {event.key[:16]}")
        _whole(event, self.deposits[event.key])
        del self.deposits[event.key]

    def _staked(self, event: Event, time_s: int) -> None:
        account = self._account(event.key)
        _positive(event.amount)
        self._set(event.key, stake=account.stake + event.amount)

    def _unstaked(self, event: Event, time_s: int) -> None:
        account = self._account(event.key)
        _positive(event.amount)
        if event.amount > account.stake:
            raise LedgerError(f"{event.key[:16]} has {account.stake} at stake, less than {event.amount}")
        stake, leaving = account.stake - event.amount, account.leaving + event.amount
        self._set(event.key, stake=stake, leaving=leaving, leaves_s=time_s + UNSTAKE_S)

    def _withdrawn(self, event: Event, time_s: int) -> None:
        account = self._account(event.key)
        if not account.leaving:
            raise LedgerError(f"{event.key[:16]} has no stake that is leaving")
        _whole(event, account.leaving)
        if time_s < account.leaves_s:
            raise LedgerError(f"{event.key[:16]} can withdraw from {account.leaves_s} on (Unix time)")
        self._set(event.key, leaving=0, leaves_s=0)

    def _credited(self, event: Event, time_s: int) -> None:
        account = self._account(event.key)
        works = event.work.split()
        if not works or event.amount < 0:
            raise LedgerError(f"a credit of {event.amount} tokens names no work, or is negative")
        if any(work in self.paid for work in works):
            raise LedgerError(f"{event.work[:60]!r} is already credited")
        self.paid.update(works)
        self._set(event.key, credit=account.credit + event.amount)

    def _slashed(self, event: Event, time_s: int) -> None:
        account = self._account(event.key)
        if event.work in self.slashed or not event.work:
            raise LedgerError(f"{event.key[:16]} was already slashed for {event.work[:60]!r}, or no work is named")
        self.slashed.add(event.work)
        self.pool += account.stake + account.leaving
        self._set(event.key, stake=0, leaving=0, leaves_s=0)

    def _account(self, key: str) -> Account:
        if key not in self.accounts:
            raise LedgerError(f"{key[:16]} is not registered")
        return self.accounts[key]

    def _set(self, key: str, **changed: int) -> None:
        self.accounts[key] = replace(self.accounts[key], **changed)  # type: ignore[arg-type]


class LedgerStakes:
    """Accounts computed from the ledger's entries. The coordinator appends `registered`, `credited` and `slashed` itself."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self.ledger = ledger
        self.clock = clock
        self._cached = Book()
        self._last: Entry | None = None  # the last entry in the cached book

    def deposit(self, key: str, amount: int) -> None:
        self._append("deposited", key=key, amount=amount)

    def reclaim(self, key: str) -> None:
        self._append("reclaimed", key=key, amount=self.deposited(key))

    def stake(self, key: str, amount: int) -> None:
        self._append("staked", key=key, amount=amount)

    def unstake(self, key: str, amount: int) -> None:
        self._append("unstaked", key=key, amount=amount)

    def withdraw(self, key: str) -> None:
        account = self.account(key)
        self._append("withdrawn", key=key, amount=account.leaving if account else 0)

    def account(self, key: str) -> Account | None:
        return self.book().accounts.get(key)

    def deposited(self, key: str) -> int:
        return self.book().deposits.get(key, 0)

    def _append(self, kind: str, **body: JSON) -> None:
        book, self._cached, self._last = self.book(), Book(), None
        book.apply(_event(kind, body), int(self.clock()))
        self.ledger.append(kind, body)

    def book(self) -> Book:
        """Return the accounts, cached between calls. Compute them anew if a rollback removed the last entry read."""
        new = self.ledger.entries(self._last.seq - 1 if self._last else 0)
        if self._last is not None and next(new, None) != self._last:
            self._cached, new = Book(), self.ledger.entries()
        for entry in new:
            if (event := read_event(entry)) is not None:
                self._cached.apply(event, entry.time_s)
            self._last = entry
        return self._cached


def read_event(entry: Entry) -> Event | None:
    """Return a ledger entry's event; None if it does not concern accounts."""
    return _event(entry.kind, json.loads(entry.body)) if entry.kind in EVENTS else None


def _event(kind: str, body: Mapping[str, Any]) -> Event:
    if kind == "registered":
        return Event(kind, body["key"], body["role"])
    if kind == "credited":
        return Event(kind, body["worker"], " ".join(body["submissions"]), body["tokens"])
    if kind == "slashed":
        return Event(kind, body["worker"], body["submission"])
    return Event(kind, body["key"], amount=body["amount"])


def _whole(event: Event, amount: int) -> None:
    if event.amount != amount:
        raise LedgerError(f"{event.key[:16]} gets {amount} back, not {event.amount}")


def _positive(amount: int) -> None:
    if amount <= 0:
        raise LedgerError(f"the amount must be positive, not {amount}")

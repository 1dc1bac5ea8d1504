"""Accounts of a pool: who is registered, what is staked on whom, who earned what, and who was slashed.

    deposit      before registration; not at risk, and can be reclaimed; registration makes it stake
    registered   once a key, with a role            credited    once a piece of work, in tokens as the validators counted
    stake        stays at risk; unstaked stake stays at risk too, for UNSTAKE_S, and can be withdrawn after that
    slash        takes all that is at risk, for one piece of work; it goes to the pool, never to whoever slashed

Two backends keep this, and one conformance suite holds for both: `LedgerStakes` here, in the hash-chained signed ledger,
and `EvmStakes`, a contract on an EVM chain (`evm`). Keys are public keys in hex, `work` names a submission, `evidence` is a
digest in hex; `payer` is the account on a chain that pays stake in and out. What changes something returns
once it is final.
Invariant: what is staked, leaving, in the pool and withdrawn always adds up to what was paid in. The rules are in `Book`;
the contract has the same ones. An action that they forbid changes nothing and raises LedgerError.
Left out: what the pool spends its stake on.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.ledger.chain import JSON, Entry, LedgerError
from shoal.ledger.table import Ledger

UNSTAKE_S = 7 * 86_400  # longer than a lie takes to be found
EVENTS = (
    "deposited",
    "reclaimed",
    "registered",
    "staked",
    "unstaked",
    "withdrawn",
    "credited",
    "slashed",
)


@dataclass(frozen=True)
class Account:
    role: str
    stake: int = 0
    leaving: int = 0  # unstaked, and still at risk
    leaves_s: int = 0  # when it can be withdrawn
    credit: int = 0  # tokens


@dataclass(frozen=True)
class Event:
    cursor: int  # grows with every event
    kind: str  # one of EVENTS
    key: str
    work: str = ""  # a submission; of "registered": the role
    amount: int = 0  # of stake, or tokens
    payer: str = ""  # of "registered" on a chain: the account that pays stake in and out


@dataclass
class Book:
    """The accounts after some events, and the rules for the next one."""

    accounts: dict[str, Account] = field(default_factory=dict)
    slashed: set[str] = field(default_factory=set)  # work
    paid: set[str] = field(default_factory=set)  # work
    deposits: dict[str, int] = field(default_factory=dict)
    pool: int = 0

    def take(self, event: Event, time_s: int) -> None:
        """Raises LedgerError for an event that the rules forbid; then nothing has changed."""
        getattr(self, f"_{event.kind}")(event, time_s)

    def _registered(self, event: Event, time_s: int) -> None:
        if event.key in self.accounts or not event.work:
            raise LedgerError(f"{event.key[:16]} is registered already, or has no role")
        self.accounts[event.key] = Account(event.work, stake=self.deposits.pop(event.key, 0))

    def _deposited(self, event: Event, time_s: int) -> None:
        _positive(event.amount)
        if event.key in self.accounts:
            raise LedgerError(f"{event.key[:16]} is registered already: stake, not deposit")
        self.deposits[event.key] = self.deposits.get(event.key, 0) + event.amount

    def _reclaimed(self, event: Event, time_s: int) -> None:
        if event.key not in self.deposits:
            raise LedgerError(f"nothing is deposited on {event.key[:16]}")
        del self.deposits[event.key]

    def _staked(self, event: Event, time_s: int) -> None:
        known = self._of(event.key)
        _positive(event.amount)
        self._set(event.key, stake=known.stake + event.amount)

    def _unstaked(self, event: Event, time_s: int) -> None:
        known = self._of(event.key)
        _positive(event.amount)
        if event.amount > known.stake:
            raise LedgerError(f"{event.key[:16]} has {known.stake} at stake, not {event.amount}")
        left, leaving = known.stake - event.amount, known.leaving + event.amount
        self._set(event.key, stake=left, leaving=leaving, leaves_s=time_s + UNSTAKE_S)

    def _withdrawn(self, event: Event, time_s: int) -> None:
        known = self._of(event.key)
        if not known.leaving or time_s < known.leaves_s:
            raise LedgerError(f"{event.key[:16]} has nothing to withdraw before {known.leaves_s}")
        self._set(event.key, leaving=0, leaves_s=0)

    def _credited(self, event: Event, time_s: int) -> None:
        known = self._of(event.key)
        works = event.work.split()
        if not works or any(work in self.paid for work in works):
            raise LedgerError(f"{event.work[:60]} is credited already, or names no work")
        self.paid.update(works)
        self._set(event.key, credit=known.credit + event.amount)

    def _slashed(self, event: Event, time_s: int) -> None:
        known = self._of(event.key)
        if event.work in self.slashed or not event.work:
            raise LedgerError(f"{event.work[:60]} was slashed for already")
        self.slashed.add(event.work)
        self.pool += known.stake + known.leaving
        self._set(event.key, stake=0, leaving=0, leaves_s=0)

    def _of(self, key: str) -> Account:
        if key not in self.accounts:
            raise LedgerError(f"{key[:16]} is not registered")
        return self.accounts[key]

    def _set(self, key: str, **changed: int) -> None:
        self.accounts[key] = replace(self.accounts[key], **changed)  # type: ignore[arg-type]


class LedgerStakes:
    """The accounts in the hash-chained signed ledger: what its entries add up to, the coordinator's own included."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self.ledger = ledger
        self.clock = clock
        self._kept = Book()
        self._last: Entry | None = None  # that is in it

    def deposit(self, key: str, amount: int) -> None:
        self._append("deposited", key=key, amount=amount)

    def reclaim(self, key: str) -> None:
        self._append("reclaimed", key=key, amount=self.deposited(key))

    def register(self, key: str, role: str, payer: str = "") -> None:
        self._append("registered", key=key, name=key[:16], role=role)

    def stake(self, key: str, amount: int) -> None:
        self._append("staked", key=key, amount=amount)

    def unstake(self, key: str, amount: int) -> None:
        self._append("unstaked", key=key, amount=amount)

    def withdraw(self, key: str) -> None:
        account = self.account(key)
        self._append("withdrawn", key=key, amount=account.leaving if account else 0)

    def credit(self, key: str, work: str, tokens: int) -> None:
        self._append("credited", worker=key, submissions=[work], tokens=tokens)

    def slash(self, key: str, work: str, evidence: str) -> None:
        self._append("slashed", worker=key, submission=work, evidence=evidence)

    def account(self, key: str) -> Account | None:
        return self._book().accounts.get(key)

    def accounts(self) -> Mapping[str, Account]:
        """All of them, by key."""
        return self._book().accounts

    def pool(self) -> int:
        return self._book().pool

    def deposited(self, key: str, payer: str = "") -> int:
        return self._book().deposits.get(key, 0)

    def _append(self, kind: str, **body: JSON) -> None:
        book, self._kept, self._last = self._book(), Book(), None
        book.take(_event(0, kind, body), int(self.clock()))
        self.ledger.append(kind, body)

    def _book(self) -> Book:
        """Kept between calls. Made again if its last entry is gone: the transaction that wrote it was undone."""
        news = self.ledger.entries(self._last.seq - 1 if self._last else 0)
        if self._last is not None and next(news, None) != self._last:
            self._kept, news = Book(), self.ledger.entries()
        for entry in news:
            if (event := read_event(entry)) is not None:
                self._kept.take(event, entry.time_s)
            self._last = entry
        return self._kept


def read_event(entry: Entry) -> Event | None:
    """What an entry of the ledger says about accounts; None: nothing."""
    return _event(entry.seq, entry.kind, json.loads(entry.body)) if entry.kind in EVENTS else None


def _event(seq: int, kind: str, body: Mapping[str, Any]) -> Event:
    if kind == "registered":
        return Event(seq, kind, body["key"], body["role"], payer=body.get("payer", ""))
    if kind == "credited":
        return Event(seq, kind, body["worker"], " ".join(body["submissions"]), body["tokens"])
    if kind == "slashed":
        return Event(seq, kind, body["worker"], body["submission"])
    return Event(seq, kind, body["key"], amount=body["amount"])


def _positive(amount: int) -> None:
    if amount <= 0:
        raise LedgerError(f"{amount} is not an amount")

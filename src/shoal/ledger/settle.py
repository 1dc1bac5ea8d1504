"""Settling: what a pool's ledger says about accounts is repeated in a contract, entry by entry.

    registered   register(key, role, payer)                      a key is registered once, whichever run was first
    credited     credit(worker, the entry's digest, tokens)      a digest is credited once
    slashed      slash(worker, the entry's digest, the hash of the rejected file)

Invariant: the contract itself refuses an entry the second time, and is asked before. So whoever settles may die, repeat
itself or lose an answer, and nothing is counted twice; entries are settled in order, so none is left out. The contract names
digests: a ledger that lacks one of them, or says otherwise there, is not the one that was settled.
Left out: several entries in one transaction.
"""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shoal.ledger.chain import Entry, LedgerError

if TYPE_CHECKING:
    from shoal.ledger.evm import EvmStakes

KINDS = ("registered", "credited", "slashed")
NO_PAYER = "0x" + "00" * 20  # of a member that named none: nobody stakes on it


def unsettled(entries: Iterable[Entry], contract: "EvmStakes") -> list[Entry]:
    """Those that are to be settled, from the first on that may not be; asks about a few of them only."""
    found = [entry for entry in entries if entry.kind in KINDS]
    works = [number for number, entry in enumerate(found) if entry.kind != "registered"]
    low, high = 0, len(works)  # those before `low` are settled, those from `high` on are not
    while low < high:
        middle = (low + high) // 2
        if is_settled(found[works[middle]], contract):
            low = middle + 1
        else:
            high = middle
    return found[works[low - 1] + 1 if low else 0 :]


def settle(entry: Entry, contract: "EvmStakes") -> bool:
    """Returns whether it had to be sent. Raises LedgerError; then send it again later."""
    if is_settled(entry, contract):
        return False
    try:
        _send(entry, contract)
    except LedgerError:
        if is_settled(entry, contract):  # an earlier transaction was only slow
            return False
        raise
    return True


def is_settled(entry: Entry, contract: "EvmStakes") -> bool:
    body = json.loads(entry.body)
    if entry.kind == "registered":
        return contract.account(body["key"]) is not None
    return contract.is_paid(entry.digest) if entry.kind == "credited" else contract.is_slashed(entry.digest)


def not_on_chain(entries: Sequence[Entry], known: set[tuple[str, str, str, int]], contract: "EvmStakes") -> list[Entry]:
    """The entries that a contract does not hold as the ledger says them. `known`: its events, as kind, key, work, tokens."""
    return [
        entry
        for entry in entries
        if entry.kind in KINDS
        and (not is_settled(entry, contract) if entry.kind == "registered" else _as_event(entry) not in known)
    ]


def _as_event(entry: Entry) -> tuple[str, str, str, int]:
    body = json.loads(entry.body)
    return entry.kind, body["worker"], entry.digest, body["tokens"] if entry.kind == "credited" else 0


def _send(entry: Entry, contract: "EvmStakes") -> None:
    body: dict[str, Any] = json.loads(entry.body)
    if entry.kind == "registered":
        contract.register(body["key"], body["role"], body.get("payer") or NO_PAYER)
    elif entry.kind == "credited":
        contract.credit(body["worker"], entry.digest, body["tokens"])
    else:
        contract.slash(body["worker"], entry.digest, body["file"])

"""The contract on a chain, where the run has one: it holds what the ledger says of accounts, entry by entry.

Invariant: a ledger that passes says of every account what its coordinator put on the chain, and no entry of it is missing
there. Any node of the chain will do, and the auditor may name one.
Called by `audit`. Left out: entries that other runs settled in the same contract.
"""

import json

from shoal.cli.audit.opened import BrokenError, Opened, naming, settings_of
from shoal.ledger.settle import KINDS, not_on_chain


def check_settled(run: Opened, rpc: str) -> str:
    """A line about it, "" for a run without a contract. `rpc` "": the node that the run's own config names."""
    section = run.config.ledger
    if not section.contract:
        return ""
    rpc = rpc or settings_of(run.folder).ledger.rpc
    if not rpc:
        return f"chain: not compared with the contract {section.contract}: name a node of its chain with --rpc"
    from shoal.ledger.evm import open_contract

    link = f"contract {section.contract}"
    with naming(link):
        contract = open_contract(rpc, section.contract)
        known = {
            (event.kind, event.key, event.work, event.amount if event.kind == "credited" else 0)
            for event in contract.events()
        }
        lacking = not_on_chain(run.chain, known, contract)
        digests = {entry.digest for entry in run.chain}
        mine = {str(json.loads(entry.body)["key"]) for entry in run.chain if entry.kind == "registered"}
    if lacking:
        first = lacking[0]
        raise BrokenError(
            link,
            f"does not hold entry {first.seq} ({first.kind}) of the ledger, and {len(lacking) - 1} more; "
            "if the chain was away, settle them: shoal pool stake settle RUN",
        )
    foreign = sum(event[0] != "registered" and event[1] in mine and event[2] not in digests for event in known)
    held = sum(entry.kind in KINDS for entry in run.chain)
    more = f"; {foreign} events of its workers are of other runs, or not of this ledger" if foreign else ""
    return f"chain: the contract {section.contract} holds all {held} entries about accounts{more}"

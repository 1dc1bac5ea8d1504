"""The end of the chain: heads that validators co-signed, heads that the auditor knows, and the seal over the tables.

Invariant: a chain that passes holds every head that anybody kept, and ends with the digests of all tables of the database
beside it, unless the auditor accepts a run that is still going or was killed (`unsealed`).
Called by `audit`.
"""

from collections.abc import Sequence

from shoal.cli.audit.opened import BrokenError, Opened, naming
from shoal.coordinator.pool import TABLE_NAMES
from shoal.ledger.chain import Head, LedgerError, check_held, open_head
from shoal.ledger.connection import table_digest
from shoal.protocol.identity import Signed

HEADS = "*/head.json"  # what validators keep in their own folders


def check_heads(run: Opened, known: Sequence[str]) -> list[Head]:
    """Every co-signed head is of this chain. Returns them. `known`: heads as they were printed. Raises BrokenError."""
    heads = []
    for entry, body in zip(run.chain, run.bodies, strict=True):
        if entry.kind == "witnessed":
            link = f"ledger entry {entry.seq}"
            with naming(link):
                if body["validator"] not in run.keys.get("validator", set()):
                    raise BrokenError(link, "co-signed by no validator of this run")
                head = open_head(Signed.model_validate_json(str(body["head"])), str(body["validator"]))
                if head.seq >= entry.seq:
                    raise BrokenError(link, f"co-signs entry {head.seq}, which is later")
                _check(run, head, "its validator")
                heads.append(head)
    for path in sorted(run.folder.glob(HEADS)):
        link = str(path.relative_to(run.folder))
        with naming(link):
            signed = Signed.model_validate_json(path.read_bytes())
            if signed.key not in run.keys.get("validator", set()):
                raise BrokenError(link, "signed by no validator of this run")
            _check(run, open_head(signed, signed.key), link)
    for text in known:
        with naming(f"head {text[:20]}"):
            _check(run, Head.parse(text, run.run), "you")
    return heads


def check_end(run: Opened, *, unsealed: bool) -> bool:
    """Whether the chain ends with a seal, which holds. Raises BrokenError if it does not, or without one if it must."""
    for entry, after in zip(run.chain, run.chain[1:], strict=False):
        if entry.kind == "sealed" and after.kind != "started":
            raise BrokenError(f"ledger entry {after.seq}", "follows a seal, and is not the start of the coordinator")
    last, body = run.chain[-1], run.bodies[-1]
    if last.kind != "sealed":
        if unsealed:
            return False
        raise BrokenError(
            f"ledger entry {last.seq + 1}",
            "missing: the ledger does not end with a seal. Entries were cut off, or the coordinator runs or was killed; "
            "stop it in order, or audit what is there with --unsealed",
        )
    if run.connection is None:
        return True
    with naming(f"ledger entry {last.seq}"):
        sealed = body["tables"]
        if not isinstance(sealed, dict) or set(sealed) != set(TABLE_NAMES):
            raise BrokenError(f"ledger entry {last.seq}", "does not seal the tables of this version")
    for name in TABLE_NAMES:
        with naming(f"table {name}"):
            if table_digest(run.connection, name) != sealed[name]:
                raise BrokenError(f"table {name}", "not what the coordinator left when it stopped")
    return True


def _check(run: Opened, head: Head, whose: str) -> None:
    if head.run != run.run:
        raise LedgerError(f"a head of the run {head.run[:60]}, not of this one")
    check_held(head, run.chain, whose)

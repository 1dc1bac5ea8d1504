"""A validator watches the ledger: it follows the chain and co-signs the newest entry now and then.

Invariant: what it co-signed follows from all that it co-signed before, also after a restart: `head.json` in its folder holds
its newest head. If the coordinator's ledger does not, it was cut off or rewritten, and the validator ends.
Called by the validator's loop.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from shoal.files import write_file
from shoal.ledger.chain import GENESIS, verify_chain
from shoal.ledger.head import Head, open_head, sign_head
from shoal.ledger.interface import Entry, LedgerError
from shoal.protocol.identity import Signed
from shoal.protocol.messages import Ok
from shoal.protocol.node import Node

HEAD = "head.json"
EVERY_S = 30.0
MOST_BYTES = 64 << 20  # of one answer: an entry holds at most what a verdict reports

log = logging.getLogger(__name__)


class Witness:
    def __init__(self, node: Node, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.node, self.path, self.clock = node, folder / HEAD, clock
        self._due_s = clock() + EVERY_S

    def look(self) -> None:
        """Co-sign what is new, every EVERY_S."""
        if self.clock() >= self._due_s:
            self.sign()

    def sign(self) -> None:
        """Co-sign the newest entry, if there is one that is not itself a co-signature. Raises LedgerError."""
        self._due_s = self.clock() + EVERY_S
        before = self._known()
        seq, digest = (before.seq, before.digest) if before else (0, GENESIS)
        if before is not None:
            held = self._page(seq - 1)
            if not held or (held[0].seq, held[0].digest) != (seq, digest):
                raise LedgerError(
                    f"the coordinator's ledger no longer holds {before}, which this validator co-signed", seq
                )
        newest, said = None, False
        while page := self._page(seq):
            verify_chain(page, self.node.invite.key, after=(seq, digest))
            newest, seq, digest = page[-1], page[-1].seq, page[-1].digest
            said = said or any(entry.kind != "witnessed" for entry in page)
        if newest is None or not said:
            return
        head = Head(run=self.node.invite.run, seq=newest.seq, digest=newest.digest)
        signed = sign_head(head, self.node.identity)
        write_file(self.path, signed.model_dump_json().encode())
        self.node.post("/v1/heads", signed, Ok)
        log.info("ledger head %s is co-signed", head)

    def _known(self) -> Head | None:
        if not self.path.exists():
            return None
        try:
            return open_head(Signed.model_validate_json(self.path.read_bytes()), self.node.identity.public)
        except ValidationError as error:
            raise LedgerError(
                f"{self.path} is damaged; remove it, and the ledger is read from its beginning"
            ) from error

    def _page(self, after: int) -> list[Entry]:
        data = self.node.get_bytes(f"/v1/ledger/{after}", most_bytes=MOST_BYTES)
        return [Entry.model_validate_json(line) for line in data.splitlines()]

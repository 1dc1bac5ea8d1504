"""A site's client of the meeting over HTTP: signed requests, retried while the meeting is down.

Invariant: the client believes only answers to its own requests, signed by the invite's key, and only a state that
matches a signed descriptor. It opens no port.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from shoal.diloco.codec import max_size_bytes
from shoal.diloco.messages import (
    PIECE_BYTES,
    Dealt,
    Figures,
    ForgottenError,
    Greeting,
    JoinRequest,
    MeetingError,
    RoundClosedError,
    RoundOutcome,
    RoundProgress,
    Share,
    StateDescriptor,
    Terms,
    Welcome,
    Why,
    name_of,
)
from shoal.protocol.calling import NodeError, RefusedError
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite
from shoal.protocol.messages import Ok
from shoal.protocol.node import KEY, Node

ERRORS: dict[int, type[MeetingError]] = {404: ForgottenError, 409: RoundClosedError}
LEAVE_TIMEOUT_S = 3.0
STATE_TRIES = 3  # several, because a round may end during the download


class Remote:
    """A site's connection to the meeting. All methods but `leave` raise MeetingError."""

    def __init__(
        self, invite: Invite, folder: Path, terms: Terms, *, patience_s: float, stop: threading.Event | None = None
    ) -> None:
        """`folder` holds the site's key. Raise MeetingError for an invite that is not for a site."""
        self.name, self.invite, self.terms = name_of(invite), invite, terms
        identity = Identity.load_or_create(folder / KEY)
        self.node = Node.of(invite, identity, patience_s=patience_s, stop=stop)

    def join(self, greeting: Greeting) -> Welcome:
        with _meeting_errors():
            return self.node.post("/v1/join", JoinRequest(invite=self.invite.signed, greeting=greeting), Welcome)

    def take(self) -> int:
        """Return the number of the next share of the data, which no other site gets."""
        return self.node.post("/v1/shares", None, Share).number

    def deal(self, round: int) -> list[str]:
        """Return the sites that share a round's work, in order; empty: not dealt yet. Raise RoundClosedError."""
        with _meeting_errors():
            return self.node.post(f"/v1/rounds/{round}/deal", None, Dealt).sites

    def leave(self) -> None:
        """Announce that this site leaves. Without this, the meeting notices only after `sites.wait_s`."""
        self.node.patience_s = LEAVE_TIMEOUT_S
        with suppress(NodeError):
            self.node.post("/v1/leave", None, Ok)

    def offer(self, round: int, digest: str, data: bytes, figures: Figures) -> None:
        """Send this site's pseudo-gradient. `digest`: of the parameters before the round. Raise RoundClosedError."""
        with _meeting_errors():
            self.node.put(f"/v1/rounds/{round}/{digest}?figures={quote(figures.model_dump_json())}", data, Ok)

    def outcome(self, round: int) -> tuple[RoundOutcome, bytes] | list[str]:
        """Return the outcome and the average, or the missing sites. Raise ForgottenError, RoundClosedError."""
        with _meeting_errors():
            progress = self.node.get(f"/v1/rounds/{round}", RoundProgress)
            if progress.outcome is None:
                return progress.waiting_for
            if not progress.outcome.kept:
                return progress.outcome, b""
            limit = max_size_bytes(self.terms.kind, self.terms.shapes.size)
            return progress.outcome, self.node.get_bytes(f"/v1/rounds/{round}/average", max_bytes=limit)

    def state(self, why: str) -> tuple[int, bytes]:
        """Return the open round and the agreed state before it, verified."""
        for _ in range(STATE_TRIES):
            descriptor = self.node.post("/v1/state", Why(why=why), StateDescriptor)
            try:
                data = self._download(descriptor)
            except RoundClosedError:
                continue
            if sha256(data).hexdigest() != descriptor.sha256:
                raise MeetingError(f"the state of round {descriptor.round} is not the one that the meeting signed")
            return descriptor.round, data
        raise MeetingError(
            f"{STATE_TRIES} times a round ended before the state was downloaded: this link is too slow for such short "
            "rounds; raise sites.inner_steps"
        )

    def _download(self, descriptor: StateDescriptor) -> bytes:
        """Download the file in signed pieces. Each is retried, so a broken connection costs only one piece."""
        pieces, at_bytes = [], 0
        while at_bytes < descriptor.size_bytes and (piece := self._piece(descriptor.round, at_bytes)):
            pieces.append(piece)
            at_bytes += len(piece)
        return b"".join(pieces)

    def _piece(self, round: int, at_bytes: int) -> bytes:
        with _meeting_errors():
            return self.node.get_bytes(f"/v1/state/{round}/{at_bytes}", max_bytes=PIECE_BYTES)


@contextmanager
def _meeting_errors() -> Iterator[None]:
    """Convert a refusal to the meeting's own error, dropping the description of the request."""
    try:
        yield
    except RefusedError as error:
        raise ERRORS.get(error.status, MeetingError)(str(error).partition(": ")[2]) from error

"""A site's side of a meeting over HTTP: signed requests, repeated while the meeting is away.

Invariant: it believes only answers that the meeting's key, which is in the invite, signed for its own request, and a state
only if its bytes are those of such a descriptor. It opens no port.
"""

import threading
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from shoal.diloco.codec import most_bytes
from shoal.diloco.messages import (
    PIECE_BYTES,
    SILENT,
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
GOOD_BYE_S = 3.0
STATE_TRIES = 3  # a round may end before the whole file has come


class Remote:
    """A site's way to the meeting. All but `leave` raise MeetingError."""

    def __init__(
        self,
        invite: Invite,
        folder: Path,
        terms: Terms,
        *,
        patience_s: float,
        stop: threading.Event | None = None,
    ) -> None:
        """`folder` holds the site's key. Raise MeetingError for an invite that is not for a site."""
        self.name, self.invite, self.terms = name_of(invite), invite, terms
        self.node = Node.of(
            invite,
            Identity.load_or_create(folder / KEY),
            patience_s=patience_s,
            stop=stop,
        )

    def join(self, greeting: Greeting) -> Welcome:
        try:
            return self.node.post("/v1/join", JoinRequest(invite=self.invite.signed, greeting=greeting), Welcome)
        except RefusedError as error:
            raise _meant(error) from error

    def take(self) -> int:
        """Return the number of the next share of the data, which no other site gets."""
        return self.node.post("/v1/shares", None, Share).number

    def deal(self, round: int) -> list[str]:
        """Return the sites that share the work of a round, in order; empty: not settled yet. Raise RoundClosedError."""
        try:
            return self.node.post(f"/v1/rounds/{round}/deal", None, Dealt).sites
        except RefusedError as error:
            raise _meant(error) from error

    def leave(self) -> None:
        """Say good-bye. A meeting that does not hear it finds out by itself, after `sites.wait_s`."""
        self.node.patience_s = GOOD_BYE_S
        with suppress(NodeError):
            self.node.post("/v1/leave", None, Ok)

    def offer(self, round: int, digest: str, data: bytes, figures: Figures = SILENT) -> None:
        """Give this site's pseudo-gradient; `digest` names the parameters it starts from. Raise RoundClosedError."""
        try:
            self.node.put(f"/v1/rounds/{round}/{digest}?figures={quote(figures.model_dump_json())}", data, Ok)
        except RefusedError as error:
            raise _meant(error) from error

    def outcome(self, round: int) -> tuple[RoundOutcome, bytes] | list[str]:
        """Return how it ended and the average, or the sites still waited for. Raise ForgottenError, RoundClosedError."""
        try:
            progress = self.node.get(f"/v1/rounds/{round}", RoundProgress)
            if progress.outcome is None:
                return progress.waiting_for
            if not progress.outcome.kept:
                return progress.outcome, b""
            most = most_bytes(self.terms.kind, self.terms.shapes.size)
            return progress.outcome, self.node.get_bytes(f"/v1/rounds/{round}/average", most_bytes=most)
        except RefusedError as error:
            raise _meant(error) from error

    def state(self, why: str) -> tuple[int, bytes]:
        """Return the open round and what is agreed before it, verified."""
        for _ in range(STATE_TRIES):
            described = self.node.post("/v1/state", Why(why=why), StateDescriptor)
            try:
                data = self._download(described)
            except RoundClosedError:
                continue
            if sha256(data).hexdigest() != described.sha256:
                raise MeetingError(f"the state of round {described.round} is not the one that the meeting signed")
            return described.round, data
        raise MeetingError(
            f"{STATE_TRIES} times a round ended before the state had come: this link is too slow for rounds this short; "
            "raise sites.inner_steps"
        )

    def _download(self, described: StateDescriptor) -> bytes:
        """The file in pieces, each signed and asked for until it comes: a connection that breaks costs one of them."""
        pieces, at_bytes = [], 0
        while at_bytes < described.size_bytes and (piece := self._piece(described.round, at_bytes)):
            pieces.append(piece)
            at_bytes += len(piece)
        return b"".join(pieces)

    def _piece(self, round: int, at_bytes: int) -> bytes:
        try:
            return self.node.get_bytes(f"/v1/state/{round}/{at_bytes}", most_bytes=PIECE_BYTES)
        except RefusedError as error:
            raise _meant(error) from error


def _meant(error: RefusedError) -> MeetingError:
    """The meeting's own words, without the request."""
    return ERRORS.get(error.status, MeetingError)(str(error).partition(": ")[2])

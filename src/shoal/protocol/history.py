"""A run as anyone sees it: its state now and its history so far, fetched from the coordinator's open routes.

Invariants: the history is fetched by cursor, so every look costs only what is new; a step or evaluation that is reported
again replaces the earlier report. A coordinator that asks to wait, because this address has read much, is asked again.
Left out: waiting and drawing, which the callers do.
"""

import time
from dataclasses import dataclass, field

import httpx
from pydantic import ValidationError

from shoal.errors import ShoalError
from shoal.protocol.calling import get
from shoal.protocol.messages import Evaluation, History, Status, WorkerSample

MAX_SAMPLES = 512  # the newest are kept
BUSY = 429  # HTTP status
PAUSE_S, PATIENCE_S = 0.5, 30.0  # between two attempts, and for all of them
MOST_BYTES = 16 << 20  # of a state or a page of history
MAX_PAGES = 1000  # of history in one look: a server that invents news for ever is left to the next look


@dataclass
class RunHistory:
    cursor: int = 0
    metrics: list[dict[str, float]] = field(default_factory=list)  # one per trained step, in order
    evaluations: list[Evaluation] = field(default_factory=list)  # by version, the final one last
    samples: list[WorkerSample] = field(default_factory=list)  # oldest first

    def add(self, news: History) -> bool:
        """Add an answer of the coordinator. Returns whether it held anything new."""
        if news.cursor == self.cursor:
            return False
        self.cursor = news.cursor
        steps = {step["step"]: step for step in [*self.metrics, *news.metrics]}
        self.metrics = [steps[number] for number in sorted(steps)]
        evaluations = {(found.version, found.final): found for found in [*self.evaluations, *news.evaluations]}
        self.evaluations = [evaluations[key] for key in sorted(evaluations)]
        self.samples = [*self.samples, *news.samples][-MAX_SAMPLES:]
        return True


class UnreachableError(ShoalError):
    """No coordinator answered; the message names the address."""


class PoolWatch:
    """`client` is shared by all looks: making one takes 20 ms."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self.url = url
        self.client = client
        self.history = RunHistory()

    def look(self) -> Status:
        """The state now; `history` then holds everything up to it. Raises UnreachableError."""
        try:
            status = Status.model_validate_json(self._get("/v1/status", {}))
            for _ in range(MAX_PAGES):
                if not self.history.add(self._news()):
                    break
            return status
        except httpx.TransportError as error:
            raise UnreachableError(
                f"no coordinator answers at {self.url} ({error or type(error).__name__}); is it running and reachable?"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, ValidationError) as error:
            raise UnreachableError(f"what answers at {self.url} is not a Shoal coordinator of this version") from error

    def _news(self) -> History:
        return History.model_validate_json(self._get("/v1/history", {"after": self.history.cursor}))

    def _get(self, path: str, query: dict[str, int]) -> bytes:
        deadline_s = time.monotonic() + PATIENCE_S
        while (answer := get(self.client, f"{self.url}{path}", MOST_BYTES, params=query)).status_code == BUSY:
            if time.monotonic() > deadline_s:
                break
            time.sleep(PAUSE_S)
        return answer.raise_for_status().content

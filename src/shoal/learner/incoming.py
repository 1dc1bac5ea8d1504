"""A step's groups as they come to every rank: the leader asks the pool, verifies what was accepted, and tells the others.

While a step trains, the leader fetches and verifies the next one's groups (`Prefetch`), as far as the pool names them.
Without `learner.stream` it names none before the batch is full.
Invariant: all ranks know the same groups in the same order. Once the batch is full they never change; until then the last
ones may still be withdrawn, as when their worker is evicted.
Called by the learner's loop, with one of these for each step.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.config import Config
from shoal.errors import ShoalError
from shoal.learner.group import Known, Outline, decode, encode
from shoal.learner.groups import Fetched, Gathering, Group, gathering, validators
from shoal.learner.ranks import Ranks
from shoal.protocol.messages import Batch, BatchGroup
from shoal.protocol.node import Node

POLL_S = 0.1
LOOK_S = 1.0  # between two looks at the next step's batch while a step trains


class Incoming:
    """`node` is the leader's connection to the pool, and None on the other ranks."""

    def __init__(
        self,
        step: int,
        node: Node | None,
        ranks: Ranks,
        config: Config,
        quarantine: Path,
        prefetch: "Prefetch | None" = None,
    ) -> None:
        """`prefetch`: of this step's groups, if it began before."""
        self.step = step
        self.node = node
        self.ranks = ranks
        self.groups: Sequence[Known] = []  # the leader's have their tokens
        self.fetched = Fetched([])  # known to the leader
        self.full = False
        self.waited_s = 0.0
        self.members: list[BatchGroup] = []  # of the batch, those left out too; known to the leader
        self._prefetch = prefetch
        self._gathering = gathering(node, config, quarantine) if node else None

    def more(self, stop: threading.Event, *, at_once: bool) -> bool:
        """Take in what was accepted since; False if `stop` came first.

        Waits until something was, unless `at_once`. Raises NodeError if a file cannot be had.
        """
        if self.node is None:
            message = self.ranks.broadcast(None)
            if not message:
                return False
            self.groups, self.full = decode(message, self._outlines)
            return True
        message, known = b"", self.fetched.groups
        try:
            batch = self._wait(self.node, stop, at_once=at_once)
            if batch is not None:
                self._take(self.node, batch)
                message = self._message(known)
            return batch is not None
        finally:  # the other ranks wait for this message even if an error is raised
            if self.ranks.size > 1:
                self.ranks.broadcast(message)

    def _wait(self, node: Node, stop: threading.Event, *, at_once: bool) -> Batch | None:
        """The batch, once it is full or holds other groups than before. None if `stop` comes first."""
        started_s = time.monotonic()
        node.doing(f"step {self.step}'s batch", waiting=True)
        if self._prefetch is not None:
            self._gathering, self._prefetch = self._prefetch.take(), None
        while not stop.is_set():
            batch = node.get(f"/v1/batches/{self.step}", Batch)
            if batch.ready or at_once or batch.groups != self.members:
                node.doing(f"training step {self.step}")
                self.waited_s += time.monotonic() - started_s
                return batch
            stop.wait(POLL_S)
        return None

    def _take(self, node: Node, batch: Batch) -> None:
        assert self._gathering is not None
        self.full = batch.ready
        if batch.ready or batch.groups != self.members:
            self.members = batch.groups
            self.fetched = self._gathering.gather(batch, validators(node))
            self.groups = self.fetched.groups

    @property
    def _outlines(self) -> list[Outline]:
        return [group for group in self.groups if isinstance(group, Outline)]

    def _message(self, known: list[Group]) -> bytes:
        """What the other ranks, which know these groups, do not know; nothing if there are no other ranks."""
        if self.ranks.size == 1:
            return b""
        groups, same = self.fetched.groups, 0
        while same < min(len(known), len(groups)) and known[same] is groups[same]:
            same += 1
        return encode(groups[same:], after=same, full=self.full)


class Prefetch(threading.Thread):
    """Fetches and verifies a step's groups beside the training of the step before."""

    def __init__(self, step: int, node: Node, config: Config, quarantine: Path) -> None:
        super().__init__(name=f"prefetch of step {step}", daemon=True)
        self.step = step
        self.node = node
        self._gathering = gathering(node, config, quarantine)
        self._ended = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        members: list[BatchGroup] = []
        try:
            while not self._ended.is_set():
                batch = self.node.get(f"/v1/batches/{self.step}", Batch)
                if batch.groups != members:
                    members = batch.groups
                    self._gathering.gather(batch, validators(self.node))
                if batch.ready:
                    return
                self._ended.wait(LOOK_S)
        except (ShoalError, OSError) as error:  # raised by `take`, in the loop's own thread
            self._error = error

    def take(self) -> Gathering:
        """What was fetched, once what is being fetched is there. Raises what the fetching raised."""
        self._ended.set()
        self.join()
        if self._error is not None:
            raise self._error
        return self._gathering

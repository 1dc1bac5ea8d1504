"""How fast each node works now, computed from successive statuses.

Invariant: a restart, which resets a node's counter, never shows as a negative pace. Called by the live view.
"""

from collections import deque

from shoal.protocol.messages import NodeStatus, Status
from shoal.watch.figures import clamp, ratio


class Pace:
    """Tokens per second of each node over the last `window_s`."""

    def __init__(self, window_s: float = 60.0) -> None:
        self._window_s = window_s
        self._samples: dict[str, deque[tuple[float, int]]] = {}  # name: (now_s, tokens)

    def add(self, status: Status) -> None:
        for node in status.nodes:
            samples = self._samples.setdefault(node.name, deque())
            tokens = clamp(node.stats.tokens)
            if samples and tokens < samples[-1][1]:
                samples.clear()  # the node restarted and counts from 0
            samples.append((status.now_s, tokens))
            while len(samples) > 2 and status.now_s - samples[1][0] >= self._window_s:
                samples.popleft()

    def tokens_per_s(self, node: NodeStatus) -> float | None:
        """The mean since the node's start until a tenth of the window has passed. None if nothing is known."""
        samples = self._samples.get(node.name, deque())
        if len(samples) > 1 and samples[-1][0] - samples[0][0] >= self._window_s / 10:
            return (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])
        return ratio(clamp(node.stats.tokens), node.stats.busy_s + node.stats.waiting_s)

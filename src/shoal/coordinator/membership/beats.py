"""Writes members' newest heartbeats to the table of nodes: each at once in a small pool, many together in a large one.

A beat also says which version the node received, when and how fast: each download is recorded once, for the timeline.

Each write is a sync of the disk, and a large pool's heartbeats would be thousands a second. So beyond AT_ONCE_PER_S, with a
burst of 10 s, they are collected and written in one statement every TOGETHER_S. A node that beats far more often
than an honest one is recorded less often than it beats.

Invariant: what is collected is at most TOGETHER_S older than the newest heartbeat of the pool; to lose it costs nothing, as
the next one follows. Nothing else of a heartbeat waits: tasks, fingerprints and announced files have their own tables.
Called by `members`, within its transaction.
"""

from shoal.coordinator.state.database import Database
from shoal.coordinator.tables.nodes import Node
from shoal.coordinator.tables.transfers import Row
from shoal.protocol.messages import Heartbeat, Intake
from shoal.shardcast.serve.guard import Rates

RECORDS_PER_S = 4.0  # of one node's heartbeats, with a burst of 10 s; an honest node beats once a second
AT_ONCE_PER_S = 50.0  # of all nodes
TOGETHER_S = 0.25
LONGEST_S = 86_400.0  # of a download, or since it


class Beats:
    def __init__(self, db: Database, *, at_once_per_s: float = AT_ONCE_PER_S) -> None:
        self.db = db
        self._of_node, self._at_once = Rates(RECORDS_PER_S), Rates(at_once_per_s)
        self._collected: dict[str, tuple[str, float, int | None, str]] = {}
        self._came: dict[str, int] = {}  # by key: the version whose download was recorded last
        self._downloads: list[Row] = []
        self._written_s = 0.0

    def take(self, node: Node, beat: Heartbeat) -> None:
        now_s = self.db.clock()
        if self._of_node.wait_s(node.key, now_s) > 0 and beat.policy_version == node.version:
            return
        self._of_node.charge(node.key, 1, now_s)
        self._collected[node.key] = (node.key, now_s, beat.policy_version, beat.stats.model_dump_json())
        self._note_download(node.key, beat.stats.intake, now_s)
        if self._at_once.wait_s("", now_s) > 0 and 0 <= now_s - self._written_s < TOGETHER_S:
            return
        self._at_once.charge("", len(self._collected), now_s)
        self.db.nodes.beat_all(list(self._collected.values()))
        self.db.transfers.add_all(self._downloads)
        self._collected.clear()
        self._downloads.clear()
        self._written_s = now_s

    def _note_download(self, key: str, intake: Intake, now_s: float) -> None:
        """What a node says of its newest download, if it is of a version that exists and another one than the last time."""
        version = intake.version
        if version is None or version == self._came.get(key) or version > (self.db.policies.newest() or 0) + 1:
            return
        self._came[key] = version
        to_s = now_s - min(intake.ago_s, LONGEST_S)
        self._downloads.append((key, version, to_s - min(intake.took_s, LONGEST_S), to_s, intake.size_bytes))

"""Suspension: a key gets no tasks until a time. It keeps its membership, its open task and all that it was credited.

    length = base_s * 2 ^ (suspensions before), at most MOST_S

A suspension ends by itself. It counts towards the length of the next one until it has been over for FORGET_S. Only the
coordinator's clock is used. One who drains or has left gets it for the day it returns.

Invariant: it slashes nobody and rests on what the coordinator saw itself, so a wrong one costs time only.
Called by `assignments` (expired tasks) and by everything that finds a soft fault that repeats.
"""

import logging

from shoal.coordinator.standing import states
from shoal.coordinator.state.database import Database
from shoal.coordinator.tables.nodes import Node

FIRST_S = 60.0  # of the first suspension, unless its cause names another length
MOST_S = 4 * 3600.0
FORGET_S = 24 * 3600.0  # after its end

log = logging.getLogger(__name__)


def suspend(db: Database, key: str, reason: str, base_s: float = FIRST_S) -> float:
    """Suspend a key, for twice as long as last time. Returns until when, by the coordinator's clock."""
    with db.transaction():
        now_s, node = db.clock(), db.nodes.get(key)
        before = 0 if node is None else node.suspensions
        if node is not None and before and now_s - node.suspended_until_s > FORGET_S:
            db.nodes.forget_suspensions(key)
            before = 0
        length_s = min(base_s * 2.0 ** min(before, 60), MOST_S)
        db.nodes.suspend_until(key, now_s + length_s)
        states.move(db.nodes, key, "suspend", reason, now_s)
    log.info("%s suspended for %.0f s: %s", node.name if node else key[:16], length_s, reason)
    return now_s + length_s


def left_s(node: Node, now_s: float) -> float:
    """Seconds until the node gets tasks again; 0 if it is not suspended."""
    return max(node.suspended_until_s - now_s, 0.0) if node.state == "suspended" else 0.0

"""What a member may do now: one table of (state, event) -> state, and the one function that changes a state.

    active      gets tasks                        unfit      its measured work is below `[requirements]`; tried again later
    suspended   no tasks until a time             dismissed  its work together speaks against it; the operator may readmit it
    draining    no new tasks; it finishes its own left       it holds nothing; the same key may come back
    banned      slashed, or evicted by the operator: no route answers it any more but this state

Silence is not a state: a node that sends no heartbeats is not counted on (`nodes.seen_s`), and nothing has to bring it back.

Invariants: a pair that the table lacks changes nothing. `banned` has no way out, every other state has one. A suspension
outlives every way back to `active`: leaving and returning ends none. `move` is the only writer of the state and writes it
only if it still is what the decision was made on, also where two processes decide at once.
Called by `members`, `suspension`, `submissions`, `spending` and `steering` (what the operator does). It logs nothing: its
caller's transaction may be undone.
"""

from typing import Literal

from shoal.coordinator.tables.nodes import Node, Nodes
from shoal.protocol.messages import NodeState

Event = Literal["suspend", "time_over", "drain", "emptied", "return", "fall_short", "dismiss", "readmit", "ban"]

TABLE: dict[tuple[NodeState, Event], NodeState] = {
    ("active", "suspend"): "suspended",
    ("active", "drain"): "draining",
    ("active", "fall_short"): "unfit",
    ("active", "dismiss"): "dismissed",
    ("active", "ban"): "banned",
    ("suspended", "suspend"): "suspended",
    ("suspended", "time_over"): "active",
    ("suspended", "drain"): "draining",
    ("suspended", "dismiss"): "dismissed",
    ("suspended", "ban"): "banned",
    ("draining", "emptied"): "left",
    ("draining", "readmit"): "active",
    ("draining", "dismiss"): "dismissed",
    ("draining", "ban"): "banned",
    ("left", "return"): "active",
    ("left", "readmit"): "active",
    ("left", "dismiss"): "dismissed",
    ("left", "ban"): "banned",
    ("unfit", "suspend"): "suspended",
    ("unfit", "time_over"): "active",
    ("unfit", "readmit"): "active",
    ("unfit", "drain"): "draining",
    ("unfit", "dismiss"): "dismissed",
    ("unfit", "ban"): "banned",
    ("dismissed", "readmit"): "active",
    ("dismissed", "ban"): "banned",
}


def after(node: Node, event: Event, now_s: float) -> NodeState | None:
    """The state that follows; None if the event changes nothing."""
    found = TABLE.get((node.state, event))
    return "suspended" if found == "active" and node.suspended_until_s > now_s else found


def move(nodes: Nodes, key: str, event: Event, reason: str, now_s: float) -> bool:
    """Let an event happen to a member. False if it changes nothing, or if there is no such member."""
    while (node := nodes.get(key)) is not None and (target := after(node, event, now_s)) is not None:
        if nodes.change_state(key, node.state, target, reason, now_s):
            return True
    return False

"""What the sealed tables say of members, against the ledger: bans, dismissals, suspensions, members that left.

    banned worker      an entry slashes it, and the reverse        suspended    files or tasks of it that went wrong before
    dismissed worker   an entry dismisses it; its evidence         validator    gave no verdict after it left
                       follows from the verdicts in the tables

Invariant: nobody lost its place without an entry or a row that says why. The rows are the coordinator's own word: that it
contradicts itself nowhere is all that is checked here.
Called by `audit`, once the tables are known to be as sealed.
"""

import json
import math

from shoal.cli.audit.found import Found
from shoal.cli.audit.opened import BrokenError, Opened
from shoal.cli.audit.pay import Pay
from shoal.coordinator.checkers import MISMATCHES
from shoal.coordinator.judgement import ACCIDENTS, UNUSABLE
from shoal.coordinator.nodes import Node, Nodes
from shoal.coordinator.submissions import Submissions
from shoal.coordinator.trust import bets
from shoal.evidence import Process
from shoal.ledger.connection import Connection
from shoal.protocol.messages import Reason, Spent

SET_BACK_S = 300.0  # by which the coordinator's clock may have been set back


def check_standing(run: Opened, found: Found, pay: Pay, connection: Connection) -> None:
    """Raises BrokenError."""
    missed = Submissions(connection).count_missed()
    dismissed = {str(body["worker"]) for _, body, _ in pay.dismissals}
    for node in Nodes(connection).all():
        link = f"table nodes: {node.name}"
        if node.role == "worker":
            if node.evicted != (node.key in found.slashed):
                raise BrokenError(
                    link, "banned, and no entry slashes it" if node.evicted else "slashed, and not banned"
                )
            if node.state == "dismissed" and node.key not in dismissed:
                raise BrokenError(link, "dismissed, and no entry says so")
            if node.suspensions and not _may_be_suspended(node, found, missed.get(node.key, 0)):
                raise BrokenError(link, f"suspended, and nothing of it went wrong ({node.reason})")
        if node.role == "validator" and node.state in ("left", "banned"):
            _check_silent(run, node)
    for link, body, observed in pay.dismissals:
        spent = [(figures, config) for id, config in observed if (figures := _spent(connection, id)) is not None]
        process = Process()
        for figures, config in spent[-body["submissions"] :]:
            process = process.after(bets(figures, config))
        same = math.isclose(process.evidence, body["evidence"], rel_tol=1e-6)
        if process.observations != body["submissions"] or not same:
            raise BrokenError(
                link, f"the verdicts give evidence of {process.evidence:.3f} nats, not {body['evidence']:.3f}"
            )


def _may_be_suspended(node: Node, found: Found, missed: int) -> bool:
    reasons = [one.reason for one in found.rejected.values() if one.worker == node.key]
    unusable = sum(reason in UNUSABLE for reason in reasons)
    return missed > 0 or unusable > ACCIDENTS or reasons.count(Reason.INEXACT) >= MISMATCHES


def _check_silent(run: Opened, node: Node) -> None:
    for entry, body in zip(run.chain, run.bodies, strict=True):
        judges = entry.kind in ("accepted", "rejected") and body["validator"] == node.key
        if judges and entry.time_s > node.state_s + SET_BACK_S:
            raise BrokenError(f"ledger entry {entry.seq}", f"judged by {node.name}, which had left")


def _spent(connection: Connection, id: str) -> Spent | None:
    """Return the tolerance that a verdict reports as used; None if the verdict does not measure it."""
    told = json.loads(connection.value("SELECT verdict FROM submissions WHERE id = ?", id) or "{}")
    if told.get("spent") is None or told.get("replay") is not None:
        return None
    return Spent.model_validate_json(json.dumps(told["spent"]))

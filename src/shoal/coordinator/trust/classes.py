"""Exactness classes: nodes whose fingerprints agree compute alike, to the last bit. Who is in whose, and who checks whom.

A node reports a fingerprint for each version that it loads. Two nodes are of one class if their fingerprints agree for the
newest version that both reported. A submission goes to a live validator of its worker's class where there is one. Whether
its tolerance is zero does not rest on this: the validator compares the worker's fingerprint for the submission's version
with its own.

Invariant: a false fingerprint gains nothing. It only chooses who checks, and makes that check stricter (docs/trust.md).
Called by `members` with every heartbeat, by `submissions` for every claim, and by `doubts`.
"""

import logging

from shoal.config import Config
from shoal.coordinator.state.database import Database
from shoal.coordinator.tables.replays import Replayed
from shoal.coordinator.tables.submissions import Submission
from shoal.protocol.messages import Heartbeat, Reason

log = logging.getLogger(__name__)


class Classes:
    def __init__(self, db: Database, config: Config) -> None:
        self.db = db
        self.config = config

    # --- what nodes report -------------------------------------------------------------------------------------------

    def report(self, key: str, beat: Heartbeat) -> None:
        """Record the fingerprint in a heartbeat. One of a version that nobody published is ignored."""
        table, found = self.db.fingerprints, beat.fingerprint
        known, renewal = table.of(key), table.renewal(key)
        if renewal.done < beat.renewals <= renewal.asked:
            table.set_done(key, beat.renewals, self.db.clock())
        if found is None:
            table.forget(key)
            return
        if self.db.clock() < renewal.outside_s:
            return
        if known.get(found.version) == found.value or self.db.policies.digest(found.version) is None:
            return
        if found.version in known:  # the machine, its libraries or its memory changed: it is in another class now
            log.info("%s has another fingerprint for version %d than before", key[:16], found.version)
            table.forget(key)
        table.put(key, found.version, found.value)

    def renewals(self, key: str) -> int:
        """How often this node was asked to load its weights again and to report a new fingerprint."""
        return self.db.fingerprints.renewal(key).asked

    def why_no_task(self, worker: str) -> str:
        """What a worker has to wait for before it gets a task; "" if nothing."""
        renewal = self.db.fingerprints.renewal(worker)
        if renewal.pending:
            return "this worker to load its weights again and to report a new fingerprint"
        left_s = renewal.outside_s - self.db.clock()
        if self.config.validator.classes == "exact" and left_s > 0:
            return f"{left_s:.0f} s: its work differed too often from that of the class that it reported"
        if self.config.validator.classes == "exact" and not self.peers(worker):
            return (
                'a validator whose fingerprint is this worker\'s: with validator.classes = "exact" only machines that '
                "compute like a validator get tasks"
            )
        return ""

    # --- who checks what ---------------------------------------------------------------------------------------------

    def together(self, one: str, other: str) -> bool:
        """Whether two nodes are of one class, by the newest version that both reported."""
        mine, theirs = self.db.fingerprints.of(one), self.db.fingerprints.of(other)
        newest = next((version for version in mine if version in theirs), None)
        return newest is not None and mine[newest] == theirs[newest]

    def live_validators(self) -> list[str]:
        return self.db.nodes.live_keys("validator", self.db.clock() - self.config.coordinator.node_timeout_s)

    def peers(self, worker: str) -> list[str]:
        """The live validators of a worker's class."""
        return [key for key in self.live_validators() if self.together(worker, key)]

    def checkers(self, submission: Submission) -> list[str]:
        """The live validators that may check this submission now.

        A doubted one goes to another validator than before. That one must be of the worker's class to confirm that the work
        is inexact; what is beyond the limits, any validator can confirm.
        """
        live, peers = self.live_validators(), self.peers(submission.worker)
        found = self.db.replays.get(submission.id)
        if found is None or found.doubted_by is None or found.doubt is None:
            return peers or live
        able = self.confirmers(submission, found.doubted_by, Reason(found.doubt))
        return [key for key in able if key in peers] or able or live

    def confirmers(self, submission: Submission, validator: str, reason: Reason) -> list[str]:
        """The other live validators that could confirm such a rejection by this one."""
        able = self.peers(submission.worker) if reason is Reason.INEXACT else self.live_validators()
        return [key for key in able if key != validator]

    def fingerprint(self, submission: Submission) -> str:
        """The worker's fingerprint for the submission's version, as it was at the submission's first claim."""
        found = self.db.replays.get(submission.id)
        if found is None:
            found = Replayed(self.db.fingerprints.of(submission.worker).get(submission.version, ""))
            self.db.replays.add(submission.id, found.fingerprint)
        return found.fingerprint

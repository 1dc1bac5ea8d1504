"""A second opinion before anything is held against anyone.

A hard rejection, or one as `inexact`, waits for a second validator where one is alive that can judge it: the submission
returns to the queue, and another validator's verdict counts. Where there is none, the first verdict counts; its validator
had loaded its weights again before it gave it.

    both reject           hard: slashed, as ever. inexact: no pay, and the mismatch is counted
    the second accepts    the first validator is the odd one: it is asked for a new fingerprint; the worker is paid
    nobody to confirm     the first verdict counts; inexact: no pay

Nobody can confirm it any more once the relays no longer hold the version, or the run's last step is trained. Then the first
verdict counts too (`submissions`): a liar must not gain by the time that a second opinion takes.

Every worker with an inexact submission is asked to load its weights again and to report a new fingerprint. If it is another
one, the worker is in another class from then on. MISMATCHES confirmed ones within WINDOW_S suspend it. As many that nobody
could confirm put it into no class for WINDOW_S: its work is judged by the limits, which costs it nothing, and costs the
validator no second prefill. What was uploaded before a worker could renew counts once.

Invariant: a flipped bit, in whichever machine, costs at most the pay of submissions that it made inexact.
Called by `submissions`. docs/trust.md says why a false verdict of one validator is doubted, though validators are trusted.
"""

import logging
from collections.abc import Callable

from shoal.coordinator.standing.suspension import suspend
from shoal.coordinator.state.database import Database
from shoal.coordinator.tables.submissions import Submission
from shoal.coordinator.trust.classes import Classes
from shoal.protocol.messages import HARD, Reason, Verdict

MISMATCHES, WINDOW_S = 3, 3600.0

log = logging.getLogger(__name__)


class Doubts:
    def __init__(self, db: Database, classes: Classes, notify: Callable[[str], None]) -> None:
        """`notify` tells the operator."""
        self.db = db
        self.classes = classes
        self.notify = notify

    def opens(self, found: Submission, validator: str, verdict: Verdict) -> bool:
        """Whether this verdict waits for a second one. If so, the submission is back in the queue."""
        reason, known = verdict.reason, self.db.replays.get(found.id)
        if reason is None or not (reason in HARD or reason is Reason.INEXACT):
            return False
        if known is not None and known.doubted_by is not None:
            return False
        if self.db.is_trained(self.classes.config.run.steps) or not self.classes.confirmers(found, validator, reason):
            return False
        self.db.replays.set_doubt(found.id, validator, reason.value, verdict.model_dump_json())
        self.db.submissions.requeue(found.id)
        return True

    def first(self, found: Submission) -> tuple[str, Verdict] | None:
        """The validator and its verdict, of a submission that waits for a second one; else None."""
        known = self.db.replays.get(found.id)
        if known is None or known.doubted_by is None or known.verdict is None:
            return None
        return known.doubted_by, Verdict.model_validate_json(known.verdict)

    def was_first(self, found: Submission, validator: str) -> bool:
        """Whether this validator gave its verdict on the submission already, and another one has it now."""
        known = self.db.replays.get(found.id)
        return known is not None and known.doubted_by == validator != found.validator

    def settle(self, found: Submission, validator: str, verdict: Verdict, reason: Reason | None) -> Reason | None:
        """The reason that counts, after a verdict that waits for nobody. Holds against each what is to be held."""
        known = self.db.replays.get(found.id)
        first = known.doubted_by if known else None
        confirmed = first is not None and first != validator
        if (
            confirmed
            and known is not None
            and known.doubt == Reason.INEXACT
            and verdict.replay is None
            and reason is None
        ):
            # The second one computes unlike the worker and the first: it cannot say that the first is wrong.
            self._renew(validator, f"could not replay {found.id} exactly, unlike {self._name(str(first))}")
            reason, confirmed = Reason.INEXACT, False
        if confirmed and not (reason is not None and (reason in HARD or reason is Reason.INEXACT)):
            self._renew(
                str(first), f"rejected {found.id} ({known.doubt if known else ''}), {self._name(validator)} did not"
            )
        if reason is Reason.INEXACT:
            self._mismatch(found, confirmed=confirmed)
        if verdict.replay is not None and (reason is None or reason is Reason.INEXACT):
            tokens, mismatched = verdict.replay.tokens, verdict.replay.mismatched
            self.db.replays.set_replayed(found.id, tokens=tokens, mismatched=mismatched, accepted=reason is None)
        return reason

    def _mismatch(self, found: Submission, *, confirmed: bool) -> None:
        renewal, uploaded_s = self.db.fingerprints.renewal(found.worker), self.db.submissions.uploaded_s(found.id)
        if not renewal.pending:
            self.db.fingerprints.ask(found.worker)
        name, now_s = self._name(found.worker), self.db.clock()
        if not confirmed:
            self.notify(f"{found.id} by {name} is inexact, and no second validator could confirm it")
        if renewal.pending or uploaded_s <= renewal.done_s:
            return  # the same cause as the mismatch for which it was asked to renew
        self.db.fingerprints.add_mismatch(found.worker, now_s, confirmed=confirmed)
        if self.db.fingerprints.mismatches(found.worker, now_s - WINDOW_S, confirmed=confirmed) < MISMATCHES:
            return
        if confirmed:
            suspend(self.db, found.worker, f"{MISMATCHES} inexact submissions within {WINDOW_S:.0f} s")
            self.db.fingerprints.forgive(found.worker)
        else:
            self.db.fingerprints.set_outside(found.worker, now_s + WINDOW_S)
            self.notify(
                f"{name} is in no exactness class for {WINDOW_S:.0f} s: a second validator would tell whose fault it is"
            )

    def _renew(self, validator: str, why: str) -> None:
        if not self.db.fingerprints.renewal(validator).pending:
            self.db.fingerprints.ask(validator)
        text = f"{self._name(validator)} {why}: it is asked to load its weights again"
        self.notify(text)
        log.info("%s", text)

    def _name(self, key: str) -> str:
        node = self.db.nodes.get(key)
        return node.name if node else key[:16]

"""The validators' queue, and why submissions were rejected. Called by the server and the report.

Invariant: a rejection is told with its reason in words and with the validator's own detail; names only, no ids.
"""

import json
from typing import Any

from shoal.dashboard.queries import Queries
from shoal.dashboard.words import is_hard, reason_words, said
from shoal.watch.figures import clean

QUEUE = 50  # oldest that are shown
REJECTED = 100  # newest
RECENT = 256  # verdicts whose waits are summed up


def validation(queries: Queries) -> dict[str, Any]:
    waits = sorted(wait for wait, _ in queries.waits_s(RECENT))
    return {
        "states": queries.states(),
        "wait_s": {"median": _at(waits, 0.5), "p95": _at(waits, 0.95), "of": len(waits)},
        "queue": [
            {
                "submission": seq,
                "worker": clean(worker or ""),
                "groups": groups,
                "version": version,
                "state": state,
                "uploaded_s": uploaded_s,
                "validator": clean(validator) if validator else None,
            }
            for seq, worker, groups, version, state, uploaded_s, validator in queries.queue(QUEUE)
        ],
        "rejected": [
            {
                "submission": seq,
                "worker": clean(worker or ""),
                "reason": reason,
                "hard": is_hard(reason),
                "words": reason_words(reason),
                "detail": said(json.loads(verdict).get("detail", "")) if verdict else "",
                "judged_s": judged_s,
                "step": step,
                "version": version,
                "groups": groups,
            }
            for seq, worker, reason, verdict, judged_s, step, version, groups in queries.rejected(REJECTED)
        ],
    }


def _at(ordered: list[float], share: float) -> float | None:
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 2) if ordered else None

"""The newest entries of the ledger, in words.

Invariant: an entry is told by what this file knows of its kind; no key, signature or config text of its body is repeated.
Called by the server.
"""

import json
from typing import Any

from shoal.dashboard.queries import Queries
from shoal.dashboard.words import reason_words
from shoal.watch.figures import clean, count

Body = dict[str, Any]


def ledger_feed(queries: Queries, *, before: int | None, kind: str, limit: int) -> list[dict[str, Any]]:
    rows = queries.entries(before, kind, limit)
    names = queries.names()
    bodies = [json.loads(body) for _, _, _, body in rows]
    numbers = queries.submission_numbers(
        [body["submission"] for body in bodies if isinstance(body.get("submission"), str)]
    )
    return [
        {
            "seq": seq,
            "time_s": time_s,
            "kind": kind_,
            "submission": numbers.get(body.get("submission", "")),
            "text": _words(kind_, body, names, numbers),
        }
        for (seq, time_s, kind_, _), body in zip(rows, bodies, strict=True)
    ]


def _words(kind: str, body: Body, names: dict[str, str], numbers: dict[str, int]) -> str:
    def who(field: str = "worker") -> str:
        return clean(names.get(str(body.get(field, "")), "a node that is gone"))

    what = f"submission {numbers.get(body.get('submission', ''), '?')}"
    match kind:
        case "started":
            return "The coordinator started."
        case "registered":
            return f"{clean(str(body.get('name', '')))} joined as {body.get('role')}."
        case "policy":
            return f"Version {body.get('version')} was published."
        case "accepted":
            checked = "checked whole" if body.get("full", True) else "checked in part"
            return f"{who()}: {what} accepted, {count(body.get('tokens'))} tokens, {checked} by {who('validator')}."
        case "rejected":
            reason = str(body.get("reason", ""))
            return f"{who()}: {what} rejected by {who('validator')}, {clean(reason)}. {reason_words(reason)}"
        case "slashed":
            return f"{who()} was slashed for {clean(str(body.get('reason', '')))}."
        case "batch":
            return f"The batch of step {int(body.get('step', 0)) + 1} is full: {len(body.get('groups', []))} groups."
        case "trained":
            return "The learner trained a step and signed what it used."
        case "credited":
            return f"{who()} was credited {count(body.get('tokens'))} tokens."
        case "forfeited":
            return f"{who()} lost {count(body.get('tokens'))} tokens of credit that waited."
        case "witnessed":
            return f"{who('validator')} signed the ledger's head."
        case "sealed":
            return "The tables of the run were sealed by their digests."
    names_ = [clean(names[str(value)]) for value in body.values() if str(value) in names]
    return f"{clean(kind)}{': ' + ', '.join(names_) if names_ else ''}."

"""The pool's figures in Prometheus' text format: what `/metrics` answers.

Invariant: it changes nothing, and no node's own claim is in it but the tokens and seconds marked as reported.
Called by the coordinator's open route. Source: the exposition format, prometheus.io/docs/instrumenting/exposition_formats.
"""

from collections.abc import Iterable, Mapping

from shoal.coordinator.database import Database

STATES = ("open", "uploaded", "validating", "accepted", "rejected", "expired")


def read_metrics(db: Database) -> str:
    """Every figure, one line each, under its help and type."""
    states = {row["state"]: row["n"] for row in db.all("SELECT state, count(*) AS n FROM submissions GROUP BY state")}
    reasons = db.all("SELECT reason, count(*) AS n FROM submissions WHERE reason IS NOT NULL GROUP BY reason")
    oldest = db.one("SELECT min(uploaded_s) AS s FROM submissions WHERE state IN ('uploaded', 'validating')")["s"]
    judged = db.one(
        "SELECT count(*) AS n, coalesce(sum(full), 0) AS full, coalesce(sum(judged_s - uploaded_s), 0) AS waited_s"
        " FROM submissions WHERE state IN ('accepted', 'rejected') AND judged_s IS NOT NULL"
    )
    tokens = db.one("SELECT coalesce(sum(tokens), 0) AS n FROM groups")["n"]
    nodes = db.all(
        "SELECT name, role, json_extract(stats, '$.tokens') AS tokens, json_extract(stats, '$.busy_s') AS busy_s,"
        " seen_s FROM nodes WHERE NOT evicted ORDER BY role, name"
    )
    evicted = db.one("SELECT count(*) AS n FROM nodes WHERE evicted")["n"]
    who = [{"name": node["name"], "role": node["role"]} for node in nodes]
    lines: list[str] = []

    def tell(name: str, kind: str, says: str, values: Iterable[tuple[Mapping[str, str], float]]) -> None:
        lines.extend([f"# HELP shoal_{name} {says}", f"# TYPE shoal_{name} {kind}"])
        lines.extend(f"shoal_{name}{_labels(labels)} {value:.10g}" for labels, value in values)

    tell(
        "submissions", "gauge", "Submissions by state.", [({"state": state}, states.get(state, 0)) for state in STATES]
    )
    tell(
        "queue_age_seconds",
        "gauge",
        "Age of the oldest upload without a verdict.",
        [({}, db.clock() - oldest if oldest else 0)],
    )
    tell("verdicts_total", "counter", "Verdicts given.", [({}, judged["n"])])
    tell("verdicts_full_total", "counter", "Verdicts that rest on a prefill.", [({}, judged["full"])])
    tell("verdict_seconds_total", "counter", "Time from upload to verdict, summed.", [({}, judged["waited_s"])])
    tell(
        "rejections_total",
        "counter",
        "Rejections by reason.",
        [({"reason": row["reason"]}, row["n"]) for row in reasons],
    )
    tell("accepted_tokens_total", "counter", "Completion tokens accepted.", [({}, tokens)])
    tell("open_step", "gauge", "The smallest step that lacks accepted groups.", [({}, db.open_step())])
    tell(
        "newest_version",
        "gauge",
        "The newest published policy version; -1 for none.",
        [({}, -1 if (v := db.newest()) is None else v)],
    )
    tell("evicted_nodes", "gauge", "Nodes that were slashed.", [({}, evicted)])
    tell(
        "node_silence_seconds",
        "gauge",
        "Since a node's last heartbeat.",
        [(w, db.clock() - node["seen_s"]) for w, node in zip(who, nodes, strict=True)],
    )
    tell(
        "node_tokens",
        "gauge",
        "Tokens generated or checked, as the node reports.",
        [(w, node["tokens"] or 0) for w, node in zip(who, nodes, strict=True)],
    )
    tell(
        "node_busy_seconds",
        "gauge",
        "Time not spent waiting, as the node reports.",
        [(w, node["busy_s"] or 0) for w, node in zip(who, nodes, strict=True)],
    )
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    """Names and reasons hold no quote, backslash or newline: their patterns in `messages` forbid it."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""

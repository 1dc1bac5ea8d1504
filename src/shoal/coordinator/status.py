"""The whole run at a glance, read from the tables: what `/v1/status` answers.

Invariant: it changes nothing, and its size does not grow with the run's length. Called by the coordinator's open route.
"""

from collections.abc import Sequence

from shoal.config import Config
from shoal.coordinator.database import Database
from shoal.protocol.messages import NodeStatus, Stats, Status


def read_status(db: Database, config: Config, run: str, notices: Sequence[str]) -> Status:
    nodes = _nodes(db)
    reasons = db.all("SELECT reason, count(*) AS n FROM submissions WHERE reason IS NOT NULL GROUP BY reason")
    totals = db.one("SELECT coalesce(sum(tokens), 0) AS tokens, coalesce(sum(stale), 0) AS stale FROM groups")
    return Status(
        run=run,
        state="finished" if db.evaluated_last(config.run.steps) else "running",
        step=db.open_step(),
        steps=config.run.steps,
        have=db.waiting(),
        need=config.coordinator.prompts_per_step,
        newest_version=db.newest(),
        started_s=db.one("SELECT started_s FROM run")["started_s"],
        now_s=db.clock(),
        nodes=nodes,
        trained=db.one("SELECT count(*) AS n FROM history WHERE kind = 'step'")["n"],
        notices=list(notices),
        reject_reasons={row["reason"]: row["n"] for row in reasons},
        slashed=[node.name for node in nodes if node.evicted],
        stale_groups=totals["stale"],
        tokens_generated=totals["tokens"],
    )


def _nodes(db: Database) -> list[NodeStatus]:
    counts = db.all("SELECT worker, state, count(*) AS n FROM submissions GROUP BY worker, state")
    by = {(row["worker"], row["state"]): row["n"] for row in counts}
    return [
        NodeStatus(
            name=node["name"],
            role=node["role"],
            url=node["url"],
            policy_version=node["version"],
            seen_s=node["seen_s"],
            evicted=bool(node["evicted"]),
            accepted=by.get((node["key"], "accepted"), 0),
            rejected=by.get((node["key"], "rejected"), 0),
            stats=Stats.model_validate_json(node["stats"]),
        )
        for node in db.all("SELECT * FROM nodes ORDER BY role, name")
    ]

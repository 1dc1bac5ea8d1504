"""Judge a run under churn: for each requirement, list every violation.

`incomplete`   the run has not trained and evaluated all of its steps
`audit`        `shoal audit` found a broken link
`lost`         a validator or the ledger recorded an acceptance that the pool does not have, the ledger lacks one that the
               pool has, or a useful group is in a batch that was not trained on
`penalised`    an honest node was rejected for a hard reason, slashed, dismissed, evicted or suspended, or its credit was
               forfeited

This is judged from the coordinator's database, the ledger and the validators' logs.
"""

import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from shoal.cli.audit.run import open_run
from shoal.protocol.messages import HARD

ACCEPTED = re.compile(r"submission ([0-9a-f]{16}-\d{6}): accepted$")


def judge(folder: Path, steps: int) -> dict[str, list[str]]:
    database = sqlite3.connect(f"file:{folder / 'coordinator' / 'pool.sqlite'}?mode=ro", uri=True)
    return {
        "incomplete": _incomplete(folder, steps),
        "audit": audit(folder),
        "lost": _lost(folder, database),
        "penalised": _penalised(folder, database),
    }


def figures(folder: Path) -> dict[str, Any]:
    database = sqlite3.connect(f"file:{folder / 'coordinator' / 'pool.sqlite'}?mode=ro", uri=True)
    rows = database.execute
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "steps": summary["steps"],
        "submissions": dict(rows("SELECT state, count(*) FROM submissions GROUP BY state")),
        "rejected": dict(rows("SELECT reason, count(*) FROM submissions WHERE reason IS NOT NULL GROUP BY reason")),
        "missed": dict(
            rows(
                "SELECT name, count(*) FROM submissions JOIN nodes ON key = worker"
                " WHERE submissions.state = 'expired' AND file_hash IS NULL GROUP BY name"
            )
        ),
        "uploaded_but_unchecked": rows(
            "SELECT count(*) FROM submissions WHERE state IN ('uploaded', 'validating')"
            " OR state = 'expired' AND file_hash IS NOT NULL"
        ).fetchone()[0],
        "groups": {
            "useful": rows("SELECT count(*) FROM groups WHERE useful").fetchone()[0],
            "trained": rows("SELECT count(*) FROM groups WHERE useful AND batch IS NOT NULL").fetchone()[0],
            "stale": rows("SELECT count(*) FROM groups WHERE useful AND stale").fetchone()[0],
            "left_over": rows("SELECT count(*) FROM groups WHERE useful AND batch IS NULL AND NOT stale").fetchone()[0],
        },
        "heldout": {name: summary[name] for name in ("heldout_before", "heldout_after")},
        **{name: summary[name] for name in ("accepted", "waste", "max_staleness", "restarts", "wall_s")},
    }


def audit(folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "audit", str(folder), "--seed", "0", "--rerun", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [] if done.returncode == 0 else (done.stdout + done.stderr).splitlines()[-5:]


def _incomplete(folder: Path, steps: int) -> list[str]:
    done = json.loads((folder / "summary.json").read_text())["steps"] if (folder / "summary.json").exists() else 0
    return [] if steps and done == steps else [f"{done} of {steps or 'unknown'} steps"]


def _lost(folder: Path, database: sqlite3.Connection) -> list[str]:
    states = dict(database.execute("SELECT id, state FROM submissions"))
    logged = {
        result[1]
        for log in sorted((folder / "logs").glob("validator*.log"))
        for line in log.read_text(errors="replace").splitlines()
        if (result := ACCEPTED.search(line))
    }
    opened = open_run(folder)
    entered = {str(body["submission"]) for body in opened.of("accepted")}
    result = [
        f"{id}: accepted by a validator, {states.get(id)} in the pool" for id in logged if states.get(id) != "accepted"
    ]
    result += [
        f"{id}: accepted in the ledger, {states.get(id)} in the pool" for id in entered if states[id] != "accepted"
    ]
    result += [f"{id}: accepted in the pool, not in the ledger" for id in _accepted(states) - entered]
    trained = {(str(id), body["step"]) for body in opened.of("trained") for id in body["submissions"]}  # type: ignore[union-attr]
    of_batches = database.execute("SELECT submission, batch FROM groups WHERE useful AND batch IS NOT NULL")
    return result + [f"{id}: in batch {step}, not trained on" for id, step in set(of_batches) - trained]


def _accepted(states: dict[str, str]) -> set[str]:
    return {id for id, state in states.items() if state == "accepted"}


def _penalised(folder: Path, database: sqlite3.Connection) -> list[str]:
    names = dict(database.execute("SELECT key, name FROM nodes"))
    hard = database.execute("SELECT worker, id, reason FROM submissions WHERE reason IS NOT NULL")
    result = [
        f"{names[worker]}: {id} rejected ({why})" for worker, id, why in hard if why in {str(one) for one in HARD}
    ]
    states = database.execute("SELECT name, state, reason FROM nodes WHERE state NOT IN ('active', 'left')")
    result += [f"{name}: {state} at the end ({why})" for name, state, why in states]
    suspended = database.execute("SELECT name, suspensions FROM nodes WHERE suspensions > 0")
    result += [f"{name}: suspended {times} times" for name, times in suspended]
    chain = open_run(folder)
    for kind in ("slashed", "dismissed", "forfeited"):
        result += [f"{names.get(str(body.get('worker')))}: {kind}" for body in chain.of(kind)]
    return result

"""Read from a run's folder the setting that simulates it and the utilisation that it had.

It reads the learner's `metrics.jsonl` and the coordinator's database. The database has the times at which tasks were
assigned, uploaded and judged, and versions were published and fetched. The setting's durations are the means of the run's.
Nothing is fitted to the utilisation.
"""

import json
import sqlite3
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

from benchmarks.pool.simulate.pool import Rig, Setting
from shoal.config import load


@dataclass(frozen=True)
class Measured:
    """Figures of a real run. The fields mean the same as in `pool.Result`."""

    step_s: float
    generating: float
    validators: float
    learner: float


def recorded(folder: Path) -> tuple[Setting, Measured]:
    config = load(folder / "config.toml")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with sqlite3.connect(f"file:{folder / 'coordinator' / 'pool.sqlite'}?mode=ro", uri=True) as db:
        tasks = db.execute(
            "SELECT worker, groups, assigned_s, uploaded_s, judged_s FROM submissions WHERE judged_s IS NOT NULL "
            "ORDER BY judged_s"
        ).fetchall()
        published = dict(db.execute("SELECT version, published_s FROM policies"))
        fetched = db.execute("SELECT version, to_s FROM transfers WHERE version > 0").fetchall()
    begun_s, ended_s = min(task[2] for task in tasks), steps[-1]["time_s"]
    workers = sorted({task[0] for task in tasks})
    own = {worker: [task for task in tasks if task[0] == worker] for worker in workers}
    checks_s = [tasks[0][4] - tasks[0][3]]
    checks_s += [judged - max(uploaded, before[4]) for before, (*_, uploaded, judged) in pairwise(tasks)]
    ends_s = {int(step["step"]) + 1: step["time_s"] for step in steps}
    fetch_s = max(0.0, mean(to_s - published[version] for version, to_s in fetched if version in published))
    rigs = [
        Rig(
            group_s=sum(uploaded - assigned for _, _, assigned, uploaded, _ in result) / sum(one[1] for one in result),
            groups=config.workers.groups_per_submission,
            fetch_s=fetch_s,
        )
        for result in own.values()
    ]
    setting = Setting(
        steps=len(steps),
        async_level=config.coordinator.async_level,
        batch=config.coordinator.prompts_per_step,
        rigs=rigs,
        validators=1,
        validate_s=sum(checks_s) / sum(task[1] for task in tasks),
        validate_start_s=0.0,
        train_s=mean(step["perf/busy_s"] for step in steps),
        publish_s=max(0.0, mean(published[v] - ends_s[v] for v in published if v in ends_s)),
        useful=1 - mean(step["reward/zero_std_frac"] for step in steps if "reward/zero_std_frac" in step),
    )
    span_s = ended_s - begun_s
    first = len(steps) // 4
    measured = Measured(
        step_s=(ended_s - steps[first - 1]["time_s"]) / (len(steps) - first),
        generating=sum(one[3] - one[2] for one in tasks) / (len(workers) * span_s),
        validators=sum(checks_s) / span_s,
        learner=sum(step["perf/busy_s"] for step in steps) / span_s,
    )
    return setting, measured

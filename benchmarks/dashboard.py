"""How fast the dashboard opens a long run of many nodes: makes its tables, lets the coordinator's code write its files.

    python benchmarks/dashboard.py [--steps 5000] [--nodes 1000] [--out benchmarks/results/dashboard.json]

CPU seconds are of the server's process and do not depend on what else the machine does; wall seconds do.
"""

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from pathlib import Path

from machine import commit

from shoal.config import load
from shoal.coordinator.database import Database, config_text
from shoal.coordinator.http.reports import read_status
from shoal.coordinator.journal import Journal
from shoal.coordinator.members import DOWNLOADS
from shoal.coordinator.pool import SCHEMA
from shoal.ledger.connection import SqliteConnection, open_sqlite
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Identity
from shoal.watch.page.server import Dashboard
from shoal.watch.record import RunRecord, RunState
from shoal.watch.run import FolderRun

ROOT = Path(__file__).parent.parent
SUBMISSIONS, GROUPS = 4, 4  # per step, per submission
STEP_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), arguments.steps, arguments.nodes)
        found = measure(Path(folder))
    found |= {
        "steps": arguments.steps,
        "nodes": arguments.nodes,
        "submissions": arguments.steps * SUBMISSIONS,
        "groups": arguments.steps * SUBMISSIONS * GROUPS,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "command": " ".join(["python", "benchmarks/dashboard.py", *sys.argv[1:]]),
        "commit": commit(),
    }
    text = json.dumps(found, indent=2) + "\n"
    sys.stdout.write(text)
    if arguments.out:
        arguments.out.write_text(text)


def measure(folder: Path) -> dict[str, object]:
    dashboard = Dashboard(FolderRun(folder))
    found: dict[str, object] = {}

    def timed(name: str, work: object) -> object:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        answer = work()  # type: ignore[operator]
        found[name] = {
            "cpu_s": round(time.process_time() - cpu_s, 3),
            "wall_s": round(time.perf_counter() - wall_s, 3),
            "bytes": len(json.dumps(answer)),
        }
        return answer

    for name in ("first", "again"):
        for path, question in dashboard.questions().items():
            timed(f"{path} {name}", lambda question=question: question({"last": "300"}))
    return found


def make(folder: Path, steps: int, nodes: int) -> None:
    draw, start_s = random.Random(0), time.time() - 7 * 86_400
    (folder / "coordinator").mkdir()
    connection = open_sqlite(folder / "coordinator" / "pool.sqlite", survives_power_cuts=False)
    identity = Identity.load_or_create(folder / "coordinator" / "identity.pem")
    ledger = Ledger(connection, identity, clock=lambda: start_s)
    db = Database(connection, ledger, lambda: start_s + steps * STEP_S)
    db.create([*SCHEMA, *DOWNLOADS])
    config = load(ROOT / "configs" / "tiny.toml", [f"run.steps={steps}"], [])
    with connection.transaction():
        keys = [f"{number:064x}" for number in range(nodes)]
        for number, key in enumerate(keys):
            role = "learner" if number == 0 else "validator" if number < 5 else "relay" if number < 10 else "worker"
            db.nodes.add(key, f"{role}-{number}", role, None, str(number), start_s + steps * STEP_S)
        for step in range(steps):
            record_step(connection, db, draw, step, steps, keys, start_s + step * STEP_S)
    record, journal = RunRecord(folder, print), Journal(connection, [])
    while record.take(db.history.after(record.history.cursor)):
        pass
    while work := journal.new():
        record.add_work(work)
    status = read_status(db, config, "long", [])
    record.write_state(RunState(status=status, config=config_text(config), under_way=[], ended=True))


def record_step(
    connection: SqliteConnection,
    db: Database,
    draw: random.Random,
    step: int,
    steps: int,
    keys: list[str],
    now_s: float,
) -> None:
    names = ("policy/entropy", "policy/mismatch_kl", "policy/clip_low", "policy/clip_high", "optim/grad_norm", "loss")
    metrics = {"step": float(step), "time_s": now_s + 9, "reward/mean": 0.3 + 0.4 * step / steps + draw.gauss(0, 0.03)}
    metrics |= {name: draw.random() for name in names} | {f"reward/source-{n}/mean": draw.random() for n in range(20)}
    metrics |= {"perf/busy_s": 8.0, "perf/waiting_s": 1.0, "perf/tokens": 2e4, "perf/tokens_per_s": 900 * draw.random()}
    metrics |= {"async/staleness_mean": draw.random(), "async/staleness_max": 2.0}
    db.history.put("step", str(step), json.dumps(metrics))
    connection.change("INSERT INTO policies VALUES (?, ?, ?, ?)", step, "0" * 64, 10**8, now_s)
    for index in range(SUBMISSIONS):
        number = step * SUBMISSIONS + index
        worker, rejected = keys[draw.randrange(10, len(keys))], draw.random() < 0.002
        id_ = f"{worker[:16]}-{number:06d}"
        connection.change(
            "INSERT INTO submissions (id, worker, number, step, version, digest, groups, deadline_s, state, nonce,"
            " assigned_s, validator, full_check, lease_s, uploaded_s, judged_s, reason, verdict, tokens, credit)"
            " VALUES (?, ?, ?, ?, ?, '', ?, ?, ?, '', ?, ?, TRUE, ?, ?, ?, ?, ?, 5000, 'credited')",
            *(id_, worker, number, step, max(step - 1, 0), GROUPS, now_s + 60),
            *("rejected" if rejected else "accepted", now_s, keys[1 + index], now_s + 305, now_s + 4, now_s + 7),
            *("proof" if rejected else None, json.dumps({"detail": "", "evidence": {}})),
        )
        for group in range(0 if rejected else GROUPS):
            connection.change(
                "INSERT INTO groups (submission, grp, version, reward, useful, flat, tokens, accepted_during, batch, task,"
                " source, target, score, graded, wrong_format, grader_error, error)"
                " VALUES (?, ?, ?, ?, TRUE, FALSE, 600, ?, ?, ?, 'arithmetic', 0, 0, 16, 0, 0, '')",
                *(id_, group, max(step - 1, 0), draw.random(), step, step, group),
            )


if __name__ == "__main__":
    main()

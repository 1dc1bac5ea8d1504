"""A pool on three sites trains with the commands of docs/operate.md, through NAT and TLS (a real nginx)."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from . import sites


def test_the_page_has_commands_for_every_site_and_role() -> None:
    commands = sites.commands(sites.PAGE.read_text())
    assert {site for site, _ in commands} == {"trusted", "relays", "home"}
    started = {text.split()[1] for _, text in commands if sites.SERVES.match(text) and text.startswith("shoal")}
    assert started == {"coordinator", "learner", "origin", "relay", "validator", "worker", "evaluator"}


@pytest.mark.slow
@pytest.mark.timeout(2 * sites.DEADLINE_S)
def test_a_pool_across_sites_trains(tmp_path: Path) -> None:
    if why := sites.missing():
        pytest.skip(why)
    done = subprocess.run([sys.executable, sites.__file__, str(tmp_path)], capture_output=True, text=True, check=False)
    logs = {log.stem: log.read_text(errors="replace") for log in tmp_path.glob("*.log")}
    assert done.returncode == 0, done.stderr[-2000:] + "".join(
        f"\n{name}: {text[-500:]}" for name, text in logs.items()
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result["ended"].values()) == {0}, result
    assert result["listening_at_home"] == "", "a worker must open no port"
    assert result["inbound"] == {"trusted to home": False, "relays to home": False}, "no site may reach a worker"
    assert result["audit"] == "the audit found no broken link"
    with sqlite3.connect(tmp_path / "trusted" / "pool" / "pool.sqlite") as pool:
        assert pool.execute("SELECT url FROM nodes WHERE role = 'relay'").fetchall() == [("https://198.51.100.20",)]
        rejected = pool.execute("SELECT reason FROM submissions WHERE state = 'rejected'").fetchall()
        workers = pool.execute(
            "SELECT name, state, suspensions FROM nodes WHERE role = 'worker' ORDER BY name"
        ).fetchall()
        accepted = dict(
            pool.execute(
                "SELECT name, count(*) FROM submissions JOIN nodes ON key = worker"
                " WHERE submissions.state = 'accepted' GROUP BY name"
            )
        )
    assert rejected == [] and workers == [("worker-0", "active", 0), ("worker-1", "active", 0)]
    assert accepted.get("worker-0", 0) > 0 and accepted.get("worker-1", 0) > 0

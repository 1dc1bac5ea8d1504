"""A pool's run ends with a summary and a picture in the coordinator's folder."""

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from shoal.coordinator.http import serving
from shoal.coordinator.http.routes import Coordinator
from shoal.coordinator.state import KEY
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Evaluation, StepReport

from .support import config

pytestmark = pytest.mark.usefixtures("every_database_slow")


def finish(folder: Path) -> None:
    """A coordinator's folder as a finished run of six steps leaves it."""
    coordinator = Coordinator(config(), "pool", Identity.load_or_create(folder / KEY), folder)
    for step in range(6):
        coordinator.pool.learning.trained(StepReport(step=step, metrics={"perf/tokens": 10.0}, trained=[]))
    for version, final in ((0, False), (6, True)):
        found = Evaluation(version=version, greedy=version / 10, sampled=None, n=4, final=final)
        coordinator.pool.learning.evaluated(found)


def serve(folder: Path, *, reports: bool, until: Path) -> None:
    """Serve until the file `until` is there."""
    stop = threading.Event()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {"record_to": None, "reports": reports}
    thread = threading.Thread(
        target=serving.serve_forever, args=(config(), "pool", folder, port, stop), kwargs=options, daemon=True
    )
    thread.start()
    deadline_s = time.monotonic() + 60
    while not until.exists() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    stop.set()
    thread.join(60)


@pytest.mark.parametrize("record_s, until", [(0.01, "reward.png"), (1e9, "coordinator.json")], ids=["later", "at once"])
def test_a_finished_pool_leaves_summary_and_picture_whenever_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_s: float, until: str
) -> None:
    monkeypatch.setattr(serving, "RECORD_S", record_s)
    finish(tmp_path)
    serve(tmp_path, reports=True, until=tmp_path / until)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["tokens_trained"], summary["heldout_after"]["greedy"]) == (6, 60, 0.6)
    assert summary["restarts"] is None
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_a_coordinator_of_shoal_run_leaves_the_report_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "RECORD_S", 0.01)
    finish(tmp_path)
    serve(tmp_path, reports=False, until=tmp_path / "evaluations.jsonl")
    assert not (tmp_path / "summary.json").exists()

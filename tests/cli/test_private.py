"""The config's private fields leave the coordinator nowhere: each holds a marker, which is looked for in every exit."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import setproctitle

from shoal.cli.launch.process import show_title
from shoal.config import Config, parse
from shoal.config.config import PRIVATE
from shoal.coordinator.database import config_text
from shoal.coordinator.http.serving import serve_forever
from shoal.protocol.invite import FILE as ADDRESS
from shoal.watch.page.server import Dashboard
from shoal.watch.run import open_run
from shoal.watch.summary import summarize
from shoal.watch.trackers import open_tracker

from ..watch.support import status as shown
from ..watch.test_trackers import fake
from .support import wait_until
from .test_origin_and_relay import InThread

MARKERS = {
    "coordinator.database": "postgresql://m4rker-user@m4rker-host/m4rker-name",
    "ledger.rpc": "http://chain.example/v3/m4rker-api-key",
    "ledger.key_file": "/home/m4rker/operator.key",
}


def config(keys: tuple[str, ...] = PRIVATE, **sections: Any) -> Config:
    for key in keys:
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = MARKERS[key]
    return parse(sections)


def test_every_private_field_has_a_marker_and_public_empties_exactly_these() -> None:
    assert set(MARKERS) == set(PRIVATE)
    made = config(run={"steps": 3})
    assert "m4rker" in str(made) and "m4rker" not in str(made.public())
    assert made.public() == parse({"run": {"steps": 3}})


def test_no_export_of_a_config_holds_a_private_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "wandb", fake("wandb", calls))
    made = config(run={"tracker": "wandb"})
    open_tracker("run", tmp_path, made)
    state, history = shown()
    exports = [calls, summarize(made, state, history, None), config_text(made)]
    assert all("m4rker" not in str(export) and "steps" in str(export) for export in exports)


def test_a_running_coordinator_shows_no_private_field(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its pages, answers, metrics, ledger, log and files; the database's address is covered by the test above."""
    made = config(("ledger.rpc", "ledger.key_file"))
    folder, record = tmp_path / "coordinator", tmp_path / "record"
    folder.mkdir()
    record.mkdir()

    def run(stop: Any) -> None:
        serve_forever(made, "test-0", folder, 0, stop, record_to=record)

    with caplog.at_level(logging.DEBUG):
        coordinator = InThread(run)
        wait_until(lambda: (folder / ADDRESS).exists() and (record / "state.json").exists())
        url = json.loads((folder / ADDRESS).read_text())["url"]
        for path in ("/healthz", "/v1/run", "/v1/offer", "/v1/status", "/v1/history", "/metrics"):
            answer = httpx.get(url + path)
            assert "m4rker" not in answer.text, path
        run_of = open_run(str(record))
        run_of.refresh()
        answers = [json.dumps(compute({}), default=str) for compute in Dashboard(run_of, []).routes().values()]
        coordinator.stopped()
    assert answers and "m4rker" not in str(answers)
    assert "m4rker" not in caplog.text
    for path in [*folder.rglob("*"), *record.rglob("*")]:
        assert not path.is_file() or b"m4rker" not in path.read_bytes(), path


@pytest.mark.parametrize(
    "command",
    [
        ["worker", "--join", "shoal1.m4rker", "--dir", "w"],
        ["worker", "--join=shoal1.m4rker"],
        ["run", "quickstart", "--set", "ledger.rpc=http://m4rker"],
        ["run", "quickstart", "--set=coordinator.database=postgresql://m4rker"],
        ["pool", "stake", "--rpc", "http://m4rker", "--key-file", "m4rker"],
    ],
)
def test_the_list_of_processes_shows_no_invite_and_no_private_field(command: list[str]) -> None:
    before = setproctitle.getproctitle()
    try:
        show_title(command)
        title = setproctitle.getproctitle()
    finally:
        setproctitle.setproctitle(before)
    assert title.startswith(f"shoal {command[0]}") and "m4rker" not in title and "…" in title

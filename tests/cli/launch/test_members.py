"""The folder of a run: its invites, its lock, and what is removed at the end."""

import fcntl
import os
import stat
from pathlib import Path

import pytest

from shoal.cli.launch.members import LOCK, locked, remove_caches
from shoal.cli.launch.swarm import Swarm
from shoal.cli.preflight.machine import used_bytes
from shoal.config import Config, parse
from shoal.errors import UserError
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Address, read_invite, run_id

KEPT = {
    "coordinator": ["coordinator.json", "pool.sqlite", "store/accepted/a.parquet", "tasks/hash"],
    "learner": ["invite", "identity.pem", "versions/v000008/w", "checkpoints/step-000008/w"],
    "learner-1": ["invite", "checkpoints/step-000008/w"],
    "origin": ["invite", "store/v000007/full/s", "store/v000008/delta/s"],
    "meet": ["invites/site-0.invite", "state-000007.safetensors", "versions/v000008/w"],
    "worker-0": ["invite", "identity.pem"],
    "model": ["w"],
    "logs": ["learner.log"],
}
CACHES = {
    "relay-0": ["store/v000008/manifest.json"],
    "worker-0": ["weights/v000008/w", "tasks/hash"],
    "validator": ["weights/v000008/w"],
}
OLD = {
    "learner": ["checkpoints/step-000002/w", "checkpoints/step-000004/w"],
    "meet": ["state-000006.safetensors"],
}


def write(folder: Path, *trees: dict[str, list[str]]) -> set[Path]:
    paths = {folder / node / name for tree in trees for node, names in tree.items() for name in names}
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * 100)
    return paths


def test_the_clean_up_removes_caches_old_checkpoints_and_old_rounds_only(tmp_path: Path) -> None:
    kept = write(tmp_path, KEPT, {"relay-0": ["invite"], "validator": ["invite"]})
    write(tmp_path, CACHES, OLD)
    before = used_bytes(tmp_path)
    config = parse({"learner": {"sites": 2}})
    assert remove_caches(tmp_path, config) == before - used_bytes(tmp_path) == 7 * 100
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == kept
    assert remove_caches(tmp_path, config) == 0


def test_a_members_invite_is_private_and_outlasts_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a copy, because `Children` sets variables
    identity = Identity.load_or_create(tmp_path / "coordinator" / "identity.pem")
    Address(url="http://127.0.0.1:1", run=run_id("run-0", identity.public)).write(tmp_path / "coordinator")
    invites = []
    for _ in range(2):
        swarm = Swarm(Config(), "run-0", tmp_path)
        worker = next(member for member in swarm.members if member.role == "worker")
        swarm._invite(worker)
        path = tmp_path / worker.name / "invite"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        invites.append(read_invite(str(path)))
    invites[0].check("worker", now_s=None)
    assert invites[0] == invites[1]


def test_a_run_locks_its_folder_until_its_process_ends(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(UserError, match="in progress"), locked(tmp_path):
        pass
    fd = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(UserError), locked(tmp_path):
        pass
    os.close(fd)
    with locked(tmp_path):
        pass

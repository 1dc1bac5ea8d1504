"""The folders and invites of a local run's processes."""

import stat
from pathlib import Path

from shoal.cli.launch import members
from shoal.config import Config, parse
from shoal.protocol.identity import Identity
from shoal.protocol.invite import read_invite, run_id


def test_a_members_invite_is_its_owners_alone_and_is_kept(tmp_path: Path) -> None:
    identity = Identity.generate()
    worker = next(member for member in members.members(Config()) if member.role == "worker")
    for _ in range(2):  # a restart
        members.invite(worker, identity, run_id("run-0", identity.public), "http://127.0.0.1:1", tmp_path)
        path = tmp_path / worker.name / "invite"
        found = read_invite(str(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        found.check("worker", now_s=None)
    members.invite(worker, Identity.generate(), "run-0", "http://127.0.0.1:1", tmp_path)
    assert read_invite(str(path)) == found


def test_workers_are_started_with_the_engines_in_turn(tmp_path: Path) -> None:
    settings = parse({"workers": {"engines": ["torch", "vllm"], "count": 3}})
    started = {one.name: members.command(one, settings, tmp_path, 2) for one in members.members(settings)}
    with_vllm = {
        name for name, words in started.items() if words[words.index("--join") + 2 :][:2] == ["--engine", "vllm"]
    }
    assert with_vllm == {"worker-1"}

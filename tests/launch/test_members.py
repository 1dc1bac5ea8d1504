"""The folders and invites of a local run's processes."""

import stat
from pathlib import Path

from shoal.config import Config
from shoal.launch import members
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

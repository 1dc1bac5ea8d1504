"""A copy of a coordinator at work takes its place: state, ledger and files are there, and no request counts twice."""

import json
import shutil
import time
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.coordinator.http.routes import Coordinator
from shoal.coordinator.operating import PoolFolderError, back_up
from shoal.ledger.connection import open_sqlite
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Policy
from tests.coordinator.support import ALICE, VALIDATOR, payload

from ..http.test_routes import CONFIG, RUN


def opened(folder: Path) -> Coordinator:
    return Coordinator(CONFIG, RUN, Identity.load_or_create(folder / "identity.pem"), folder)


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    found = opened(tmp_path / "pool")
    for key, name, role in ((ALICE, "alice", "worker"), (VALIDATOR, "v", "validator")):
        invite = payload(name, role=role, nonce=key[:32]).model_copy(update={"expires_s": int(time.time()) + 600})
        found.pool.members.register(key, invite, None)
    found.pool.learning.published(Policy(version=0, digest="d" * 64, size_bytes=1))
    found.store.put("submissions", b"a rollout file")
    (tmp_path / "pool" / "invites").mkdir()
    (tmp_path / "pool" / "invites" / "bob.invite").write_text("secret")
    return found


def state(found: Coordinator) -> dict[str, object]:
    told = json.loads(found.status().model_dump_json())
    return {name: value for name, value in told.items() if name != "now_s"}


def test_a_copy_taken_amid_a_write_is_the_state_before_it(coordinator: Coordinator, tmp_path: Path) -> None:
    before = state(coordinator)
    writer = open_sqlite(tmp_path / "pool" / "pool.sqlite")
    with writer.transaction():
        writer.change("DELETE FROM nodes")  # not committed while the copy is made
        back_up(tmp_path / "pool", tmp_path / "copy")
    assert state(coordinator) != before
    shutil.rmtree(tmp_path / "pool")  # the machine is lost
    again = opened(tmp_path / "copy")
    assert state(again) == before
    assert again.identity.public == coordinator.identity.public
    again.pool.learning.published(Policy(version=1, digest="e" * 64, size_bytes=1))  # its ledger goes on
    assert state(again)["newest_version"] == 1


def test_files_are_there_and_secrets_stay_secret(coordinator: Coordinator, tmp_path: Path) -> None:
    back_up(tmp_path / "pool", tmp_path / "copy")
    names = {path.name for path in (tmp_path / "pool" / "store" / "submissions").iterdir()}
    assert names and names == {path.name for path in (tmp_path / "copy" / "store" / "submissions").iterdir()}
    assert (tmp_path / "copy" / "invites" / "bob.invite").read_text() == "secret"
    assert (tmp_path / "copy").stat().st_mode & 0o077 == 0
    assert (tmp_path / "copy" / "identity.pem").stat().st_mode & 0o077 == 0


def test_what_was_signed_before_the_copy_is_opened_is_refused(coordinator: Coordinator, tmp_path: Path) -> None:
    earlier_s = int(time.time()) - 1
    nonces = coordinator.admission.nonces
    assert nonces.spend(ALICE, "first", earlier_s)
    back_up(tmp_path / "pool", tmp_path / "copy")
    assert nonces.spend(ALICE, "after the copy", earlier_s)
    again = opened(tmp_path / "copy").admission.nonces
    assert not again.spend(ALICE, "first", earlier_s)
    assert not again.spend(ALICE, "after the copy", earlier_s)
    assert again.spend(ALICE, "new", int(time.time()) + 2)


def test_what_cannot_be_copied_is_told(
    coordinator: Coordinator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pool", "backup", str(tmp_path / "pool"), str(tmp_path / "copy")]) == 0
    assert "shoal coordinator --dir" in capsys.readouterr().out
    with pytest.raises(PoolFolderError, match="copy exists"):
        back_up(tmp_path / "pool", tmp_path / "copy")
    with pytest.raises(PoolFolderError, match="pg_dump"):
        back_up(tmp_path, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_folders_of_nodes_beside_it_are_left_out(coordinator: Coordinator, tmp_path: Path) -> None:
    """`shoal pool up` starts them there: a learner at work replaces checkpoints while the copy is made."""
    Identity.load_or_create(tmp_path / "pool" / "learner" / "identity.pem")
    back_up(tmp_path / "pool", tmp_path / "copy")
    assert not (tmp_path / "copy" / "learner").exists() and (tmp_path / "copy" / "identity.pem").is_file()

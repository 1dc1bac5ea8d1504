"""The operator's `shoal pool evict`, `shoal pool drain` and `shoal pool readmit`, and invites for a name in use."""

from pathlib import Path

import pytest

from shoal.cli import main
from shoal.coordinator import trust
from shoal.coordinator.nodes import SCHEMA, Nodes
from shoal.evidence import Process
from shoal.ledger.connection import open_sqlite
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Address


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    connection = open_sqlite(tmp_path / "pool.sqlite")
    for statement in [*SCHEMA, *trust.SCHEMA]:
        connection.change(statement)
    nodes = Nodes(connection)
    for number, role in enumerate(("relay", "relay", "worker")):
        nodes.add(f"key{number}", f"{role}-{number}", role, f"http://{number}", f"invite{number}", 0.0)
    return nodes


def test_an_evicted_relay_is_no_longer_listed_and_its_key_is_banned(tmp_path: Path, nodes: Nodes) -> None:
    assert main(["pool", "evict", str(tmp_path), "relay-0"]) == 0
    assert (nodes.relay_urls(), nodes.evicted_keys()) == (["http://1"], ["key0"])


@pytest.mark.parametrize("name", ["worker-2", "relay-9"])
def test_only_relays_can_be_evicted_by_the_operator(
    tmp_path: Path, nodes: Nodes, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pool", "evict", str(tmp_path), name]) == 2
    assert f"{name} is not a relay of this pool; its relays are: relay-0, relay-1" in capsys.readouterr().err
    assert nodes.evicted_keys() == []


def test_an_invite_with_the_name_of_a_node_is_refused(
    tmp_path: Path, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    Identity.load_or_create(tmp_path / "identity.pem")
    Address(url="http://127.0.0.1:9", run="r").write(tmp_path)
    invite = ["pool", "invite", str(tmp_path), "--role", "worker", "--name"]
    assert main([*invite, "relay-0"]) == 2
    assert "a node of this pool is already named relay-0; choose another --name" in capsys.readouterr().err
    assert main([*invite, "worker-3"]) == 0


def state(nodes: Nodes, key: str) -> str:
    node = nodes.get(key)
    assert node is not None
    return node.state


def test_a_worker_is_drained_and_readmitted(tmp_path: Path, nodes: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "drain", str(tmp_path), "worker-2"]) == 0
    assert state(nodes, "key2") == "draining" and "no new tasks" in capsys.readouterr().out
    assert main(["pool", "drain", str(tmp_path), "worker-2"]) == 1
    assert "worker-2 is draining (drained by the operator): `drain` changes nothing" in capsys.readouterr().err
    assert main(["pool", "readmit", str(tmp_path), "worker-2"]) == 0
    assert state(nodes, "key2") == "active"
    assert main(["pool", "drain", str(tmp_path), "relay-0"]) == 2


def test_the_evidence_against_a_dismissed_worker_is_deleted_when_it_is_readmitted(tmp_path: Path, nodes: Nodes) -> None:
    evidence = trust.EvidenceTable(nodes.connection)
    evidence.put("key2", "validator", Process(3, {"beyond 0": 20.0}))
    nodes.move("key2", "dismiss", "", 0.0)
    assert main(["pool", "readmit", str(tmp_path), "worker-2"]) == 0
    assert state(nodes, "key2") == "active"
    assert evidence.of("key2") == {}


def test_a_slashed_worker_cannot_be_readmitted(tmp_path: Path, nodes: Nodes) -> None:
    nodes.move("key2", "ban", "slashed", 0.0)
    assert main(["pool", "readmit", str(tmp_path), "worker-2"]) == 1
    assert nodes.evicted_keys() == ["key2"]


@pytest.mark.parametrize("arguments", [[], ["worker-2", "--join", "x"]])
def test_drain_needs_either_a_name_or_an_invite(tmp_path: Path, arguments: list[str]) -> None:
    assert main(["pool", "drain", str(tmp_path), *arguments]) == 2

"""`shoal evict`: the operator removes a relay, such as one that answers nothing."""

from pathlib import Path

import pytest

from shoal.cli import main
from shoal.coordinator.tables.connection import open_sqlite
from shoal.coordinator.tables.nodes import SCHEMA, Nodes


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    connection = open_sqlite(tmp_path / "pool.sqlite")
    for statement in SCHEMA:
        connection.change(statement)
    found = Nodes(connection)
    for number, role in enumerate(("relay", "relay", "worker")):
        found.add(f"key{number}", f"{role}-{number}", role, f"http://{number}", f"invite{number}", 0.0)
    return found


def test_an_evicted_relay_is_named_to_nobody_and_its_key_is_banned(tmp_path: Path, nodes: Nodes) -> None:
    assert main(["evict", str(tmp_path), "relay-0"]) == 0
    assert (nodes.relay_urls(), nodes.evicted_keys()) == (["http://1"], ["key0"])


@pytest.mark.parametrize("name", ["worker-2", "relay-9"])
def test_only_relays_are_evicted_by_hand(
    tmp_path: Path, nodes: Nodes, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evict", str(tmp_path), name]) == 1
    assert f"{name} is not a relay of this pool; its relays are: relay-0, relay-1" in capsys.readouterr().err
    assert nodes.evicted_keys() == []

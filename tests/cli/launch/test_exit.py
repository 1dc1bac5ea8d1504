"""The exit status of a node says whether a restart may help."""

import errno

import pytest

from shoal.cli.main import COMMANDS, FAILED, LASTING, main
from shoal.errors import ShoalError
from shoal.protocol.calling import NodeError

WORKER = ["worker", "--join", "x", "--dir", "y"]


@pytest.mark.parametrize(
    ("command", "error", "status"),
    [
        (WORKER, OSError(errno.EADDRINUSE, "address already in use"), LASTING),
        (WORKER, OSError(errno.ENOSPC, "no space left on device"), LASTING),
        (WORKER, ShoalError("no chat template"), LASTING),
        (WORKER, NodeError("the coordinator was away"), FAILED),
        (WORKER, ConnectionResetError(errno.ECONNRESET, "reset"), FAILED),
        (["grade", "x.toml", "y.jsonl"], ShoalError("no model"), FAILED),
    ],
    ids=["port", "disk", "template", "away", "reset", "no-node"],
)
def test_a_lasting_failure_of_a_node_has_its_own_status(
    command: list[str], error: Exception, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setitem(COMMANDS, command[0], fail)
    assert main(command) == status

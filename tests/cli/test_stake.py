"""`shoal pool stake` over real HTTP: a stranger stakes on a chain and joins, an operator books stakes without a chain."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import DONE, FAILED, USAGE, main
from shoal.config import parse
from shoal.coordinator.folder import KEY
from shoal.coordinator.http.serving import serve_forever
from shoal.protocol.calling import RefusedError
from shoal.protocol.identity import Identity
from shoal.protocol.invite import FILE as ADDRESS
from shoal.protocol.invite import read_invite, run_id
from shoal.protocol.node import Node

from ..ledger.stakes_support import anvil_node
from .support import wait_until

PATIENCE_S = 120.0
PRIVATE_KEY = "0x59c6995e998f97a5a0044966f0945389dc9e86dae88c7a8412f4603b6b78690d"  # anvil's second account
SETTINGS: dict[str, Any] = {
    "coordinator": {"prompts_per_step": 4},
    "learner": {"optimizer_steps_per_step": 1},
    "requirements": {"stake": 100},
}


@contextmanager
def serving(folder: Path, settings: dict[str, Any]) -> Iterator[Path]:
    """Run a coordinator in a thread. Yield the file of an open invite."""
    folder.mkdir()
    run, stop = run_id("staked", Identity.load_or_create(folder / KEY).public), threading.Event()
    thread = threading.Thread(target=serve_forever, args=(parse(settings), run, folder, 0, stop))
    thread.start()
    try:
        wait_until(lambda: (folder / ADDRESS).exists())
        invite = folder.parent / "guest.invite"
        command = ["pool", "invite", str(folder), "--role", "worker", "--name", "guest", "--open", "--out", str(invite)]
        assert main(command) == DONE
        yield invite
    finally:
        stop.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def waits_for(node: Node) -> str:
    return node.beat(wants_task=True).waiting_for


@pytest.mark.slow
def test_a_stranger_stakes_on_a_chain_and_gets_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with anvil_node() as rpc:
        assert main(["pool", "stake", "deploy", "--rpc", rpc]) == DONE
        contract = capsys.readouterr().out.split('contract = "')[1][:42]
        ledger = {"rpc": rpc, "contract": contract}
        key_file = tmp_path / "owner.key"
        key_file.write_text(PRIVATE_KEY)
        key_file.chmod(0o600)
        with serving(tmp_path / "pool", SETTINGS | {"ledger": ledger}) as invite:
            member = ["--join", str(invite), "--dir", str(tmp_path / "w"), "--rpc", rpc, "--key-file", str(key_file)]

            def stake(*words: str) -> str:
                assert main(["pool", "stake", words[0], *member, *words[1:]]) == DONE
                return capsys.readouterr().out

            def join() -> Node:
                return Node.join(read_invite(str(invite)), tmp_path / "w", patience_s=PATIENCE_S)

            with pytest.raises(RefusedError, match="has staked 0, but an open invite needs 100"):
                join()
            assert "not registered; 150 deposited" in stake("deposit", "150")
            node = join()
            section = node.config().ledger
            assert (section.contract, section.rpc, section.key_file) == (contract, "", ""), (
                "the operator's rpc and key_file must not reach a node"
            )
            assert node.name.startswith("guest-")
            wait_until(lambda: not waits_for(node).startswith("more stake"))
            assert "50 staked, 100 leaving" in stake("unstake", "100")
            wait_until(lambda: waits_for(node).startswith("more stake: this key has 50 at risk"))
            stake("deposit", "50")
            wait_until(lambda: not waits_for(node).startswith("more stake"))
            assert main(["pool", "stake", "withdraw", *member]) == FAILED
            assert "the contract refuses" in capsys.readouterr().err


def test_without_a_chain_the_operator_books_payments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path / "pool", SETTINGS) as invite:
        key = Identity.load_or_create(tmp_path / "w" / KEY).public
        book = ["pool", "stake", "book", str(tmp_path / "pool")]
        for wrong in (key[1:], f"x{key[1:]}", f"A{key[1:]}"):
            assert main([*book, "stake", wrong, "100"]) == USAGE and "is not a worker's key" in capsys.readouterr().err
        assert main([*book, "stake", key, "100"]) == DONE
        node = Node.join(read_invite(str(invite)), tmp_path / "w", patience_s=PATIENCE_S)
        assert not waits_for(node).startswith("more stake")
        assert main([*book, "unstake", key, "1"]) == DONE
        assert waits_for(node).startswith("more stake: this key has 99 at risk")
        assert main([*book, "unstake", key, "500"]) == FAILED
        assert "has 99 at stake" in capsys.readouterr().err

"""The audit checks the ledger's entries about accounts against their rules, and against the contract on the chain."""

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli.audit.audit import audit, check_settled
from shoal.cli.audit.run import BrokenError, Checks
from shoal.config import dumps
from shoal.config.sections import LedgerSection
from shoal.ledger import evm
from shoal.ledger.connection import open_sqlite
from shoal.ledger.evm import EvmStakes, deploy, settle
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Identity

from ...ledger.stakes_support import RevmChain
from .recorded import ALICE, Recorded

A = "a1" * 32


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("deposited", {"key": ALICE.public, "amount": 5}),
        ("unstaked", {"key": ALICE.public, "amount": 8}),
        ("withdrawn", {"key": ALICE.public, "amount": 3}),
        ("decided", {"submission": "w-1", "granted": True}),
    ],
)
def test_an_entry_that_breaks_the_rules_of_accounts_is_named(tmp_path: Path, kind: str, body: dict[str, Any]) -> None:
    run = Recorded(tmp_path / "run")
    run.pool.db.ledger.append("staked", {"key": ALICE.public, "amount": 7})
    run.publish(0)
    (run.folder / "config.toml").write_text(dumps(run.config))
    audit(run.folder, lambda line: None, Random(0), rerun=0, unsealed=True)
    entry = run.pool.db.ledger.append(kind, body)
    with pytest.raises(BrokenError) as broken:
        audit(run.folder, lambda line: None, Random(0), rerun=0, unsealed=True)
    assert broken.value.link == f"ledger entry {entry.seq}"


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A run whose ledger is settled in a contract."""
    pytest.importorskip("pyrevm", reason="pyrevm is not installed: make evm")
    pytest.importorskip("eth_abi", reason="web3.py is not installed: make evm")
    chain = RevmChain()
    contract = EvmStakes(chain, deploy(chain))
    monkeypatch.setattr(evm, "Web3Chain", lambda url, private_key="": chain)
    ledger = Ledger(open_sqlite(":memory:"), Identity.generate(), clock=lambda: 5)
    ledger.append("started", {"run": "r"})
    ledger.append("registered", {"key": A, "name": "a", "role": "worker"})
    ledger.append("credited", {"worker": A, "submissions": ["a-1"], "tokens": 30})
    ledger.append("slashed", {"worker": A, "submission": "a-2", "reason": "proof", "file": "cd" * 32})
    section = LedgerSection(contract=contract.address)
    run = SimpleNamespace(
        config=SimpleNamespace(ledger=section),
        chain=list(ledger.entries()),
        folder=tmp_path,
        contract=contract,
        checks=Checks(),
    )
    for entry in run.chain[1:]:
        settle(entry, contract)
    return run


def test_a_settled_ledger_passes_and_the_report_says_if_it_was_not_compared(scene: Any) -> None:
    assert check_settled(scene, "http://chain").endswith("holds all 3 entries about accounts")
    assert "not compared" in check_settled(scene, "")


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_entry_that_the_contract_lacks_is_named(scene: Any, number: int) -> None:
    entry = scene.chain[number]
    body = entry.body.replace(A, "b2" * 32)  # as if the coordinator had named another worker
    scene.chain[number] = entry.model_copy(update={"body": body})
    with pytest.raises(BrokenError, match=f"lacks entry {number + 1}"):
        check_settled(scene, "http://chain")


def test_a_ledger_that_was_cut_off_after_it_was_settled_is_reported(scene: Any) -> None:
    del scene.chain[-1]
    assert "1 of its events name members of this run but match no entry" in check_settled(scene, "http://chain")

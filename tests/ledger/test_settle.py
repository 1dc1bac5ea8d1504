from collections.abc import Iterator

import pytest

from shoal.ledger.chain import Entry, LedgerError
from shoal.ledger.connection import open_sqlite
from shoal.ledger.evm import NO_PAYER, EvmStakes, deploy, not_on_chain, settle, unsettled
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Identity

from .stakes_support import RevmChain

A, B, FILE = "a1" * 32, "b2" * 32, "cd" * 32
PAYER = "0x" + "11" * 20


@pytest.fixture
def contract() -> Iterator[EvmStakes]:
    pytest.importorskip("pyrevm", reason="pyrevm is not installed: make evm")
    pytest.importorskip("eth_abi", reason="web3.py is not installed: make evm")
    chain = RevmChain()
    yield EvmStakes(chain, deploy(chain))


class Losing:
    """A contract whose transactions are carried out, but whose answer is lost."""

    def __init__(self, contract: EvmStakes) -> None:
        self.contract = contract

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        method = getattr(self.contract, name)
        if name not in ("register", "credit", "slash"):
            return method

        def lose(*arguments: object) -> None:
            method(*arguments)
            raise LedgerError("no answer")

        return lose


def some_work() -> list[Entry]:
    ledger = Ledger(open_sqlite(":memory:"), Identity.generate(), clock=lambda: 5)
    ledger.append("started", {"run": "r"})
    ledger.append("registered", {"key": A, "name": "a", "role": "worker", "payer": PAYER})
    ledger.append("registered", {"key": B, "name": "b", "role": "validator"})
    ledger.append("credited", {"worker": A, "submissions": ["a-1", "a-2"], "tokens": 30})
    ledger.append("batch", {"step": 0})
    ledger.append("credited", {"worker": A, "submissions": ["a-3"], "tokens": 12})
    ledger.append("slashed", {"worker": A, "submission": "a-4", "reason": "proof", "file": FILE})
    ledger.append("registered", {"key": "c3" * 32, "name": "c", "role": "worker"})
    return list(ledger.entries())


def events(contract: EvmStakes) -> set[tuple[str, str, str, int]]:
    return {
        (event.kind, event.key, event.work, event.amount if event.kind == "credited" else 0)
        for event in contract.events()
    }


def test_every_entry_is_settled_once_whoever_repeats_it(contract: EvmStakes) -> None:
    contract.deposit(A, 100)
    entries = some_work()
    assert len(unsettled(entries, contract)) == 6
    for entry in unsettled(entries, contract):
        assert settle(entry, contract) and not settle(entry, contract)
    found = contract.account(A)
    assert found is not None and (found.credit, found.stake, contract.pool()) == (42, 0, 100)
    works = [(event.kind, event.work) for event in contract.events() if event.kind in ("credited", "slashed")]
    assert works == [("credited", entries[3].digest), ("credited", entries[5].digest), ("slashed", entries[6].digest)]
    assert not_on_chain(entries, events(contract), contract) == []


@pytest.mark.parametrize("done", range(7))
def test_it_goes_on_where_it_ended(contract: EvmStakes, done: int) -> None:
    entries = some_work()
    for entry in unsettled(entries, contract)[:done]:
        settle(entry, contract)
    left = unsettled(entries, contract)
    assert sum(settle(entry, contract) for entry in left) == 6 - done, "none twice, none left out"
    found = contract.account(A)
    assert found is not None and found.credit == 42


def test_a_lost_answer_is_no_reason_to_pay_again(contract: EvmStakes) -> None:
    losing = Losing(contract)
    for entry in some_work():
        if entry.kind in ("registered", "credited", "slashed"):
            assert not settle(entry, losing)
    found = contract.account(A)
    assert found is not None and found.credit == 42


def test_what_the_contract_refuses_is_an_error_and_nothing_after_it_is_lost(contract: EvmStakes) -> None:
    entries = some_work()
    with pytest.raises(LedgerError, match="the contract refuses"):
        settle(entries[3], contract)
    assert len(unsettled(entries, contract)) == 6


def test_a_ledger_that_says_otherwise_than_the_contract_is_told(contract: EvmStakes) -> None:
    entries = some_work()
    for entry in unsettled(entries, contract):
        settle(entry, contract)
    more = entries[3].model_copy(update={"body": entries[3].body.replace('"tokens":30', '"tokens":31')})
    other = entries[6].model_copy(update={"digest": "0" * 64})
    assert not_on_chain([*entries[:3], more, *entries[4:6], other], events(contract), contract) == [more, other]


def test_nobody_stakes_on_a_key_that_named_no_payer(contract: EvmStakes) -> None:
    contract.register(B, "validator", NO_PAYER)
    with pytest.raises(LedgerError, match="the contract refuses"):
        contract.stake(B, 5)

"""Settling copies each ledger entry into the contract once, even if calls are repeated or answers are lost."""

import pytest

from shoal.ledger.chain import Entry, LedgerError
from shoal.ledger.connection import open_sqlite
from shoal.ledger.evm import NO_PAYER, EvmStakes, deploy, not_on_chain, settle, unsettled
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Identity

from .stakes_support import InContract, revm_chain

A, B, FILE = "a1" * 32, "b2" * 32, "cd" * 32
PAYER = "0x" + "11" * 20


@pytest.fixture
def contract() -> InContract:
    chain = revm_chain()
    return InContract(chain, deploy(chain))


class LosesAnswers:
    """A contract that carries out transactions, but whose answers are lost."""

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


def credit(contract: EvmStakes) -> int:
    account = contract.account(A)
    assert account is not None
    return account.credit


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


def test_repeated_settling_sends_each_entry_once(contract: InContract) -> None:
    contract.deposit(A, 100)
    entries = some_work()
    assert len(unsettled(entries, contract)) == 6
    for entry in unsettled(entries, contract):
        assert settle(entry, contract) and not settle(entry, contract)
    account = contract.account(A)
    assert account is not None and (account.credit, account.stake, contract.pool()) == (42, 0, 100)
    works = [(event.kind, event.work) for event in contract.events() if event.kind in ("credited", "slashed")]
    assert works == [("credited", entries[3].digest), ("credited", entries[5].digest), ("slashed", entries[6].digest)]
    assert not_on_chain(entries, events(contract), contract) == []


@pytest.mark.parametrize("done", range(7))
def test_an_interrupted_settling_continues_with_the_next_entry(contract: InContract, done: int) -> None:
    entries = some_work()
    for entry in unsettled(entries, contract)[:done]:
        settle(entry, contract)
    assert sum(settle(entry, contract) for entry in unsettled(entries, contract)) == 6 - done
    assert credit(contract) == 42


def test_an_entry_whose_answer_was_lost_is_not_sent_again(contract: InContract) -> None:
    for entry in some_work():
        if entry.kind in ("registered", "credited", "slashed"):
            assert not settle(entry, LosesAnswers(contract))
    assert credit(contract) == 42


def test_a_refused_entry_is_an_error_and_stays_unsettled(contract: InContract) -> None:
    entries = some_work()
    with pytest.raises(LedgerError, match="the contract refuses"):
        settle(entries[3], contract)
    assert len(unsettled(entries, contract)) == 6


def test_entries_that_differ_from_the_contract_are_reported(contract: InContract) -> None:
    entries = some_work()
    for entry in unsettled(entries, contract):
        settle(entry, contract)
    more = entries[3].model_copy(update={"body": entries[3].body.replace('"tokens":30', '"tokens":31')})
    other = entries[6].model_copy(update={"digest": "0" * 64})
    assert not_on_chain([*entries[:3], more, *entries[4:6], other], events(contract), contract) == [more, other]


def test_nobody_can_stake_on_a_key_without_a_payer(contract: InContract) -> None:
    contract.register(B, "validator", NO_PAYER)
    with pytest.raises(LedgerError, match="the contract refuses"):
        contract.stake(B, 5)

"""One suite for every backend of the accounts: SQLite, the contract on an EVM in this process, the contract on anvil."""

import sqlite3
from collections.abc import Iterator
from importlib.resources import files

import pytest

from shoal.ledger.chain import LedgerError
from shoal.ledger.connection import SqliteConnection
from shoal.ledger.evm import EvmStakes, artifact, deploy
from shoal.ledger.stakes import UNSTAKE_S, Account, LedgerStakes
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Identity

from .stakes_support import ACCOUNT, BACKENDS, Backend, RevmChain, Stakes

A, B, DIGEST = "a1" * 32, "b2" * 32, "cd" * 32


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with BACKENDS[request.param]() as found:
        yield found


def known(stakes: Stakes, key: str = A) -> Account:
    found = stakes.account(key)
    assert found is not None
    return found


def test_registration_is_once_and_comes_first(backend: Backend) -> None:
    stakes, _ = backend
    assert stakes.account(A) is None
    for act in (
        lambda: stakes.stake(A, 5),
        lambda: stakes.credit(A, "w-1", 3),
        lambda: stakes.slash(A, "w-1", DIGEST),
    ):
        with pytest.raises(LedgerError):
            act()
    stakes.register(A, "worker")
    with pytest.raises(LedgerError):
        stakes.register(A, "validator")
    with pytest.raises(LedgerError):
        stakes.register(B, "")
    assert known(stakes) == Account("worker")


def test_stake_leaves_only_after_its_time_and_once(backend: Backend) -> None:
    stakes, passes = backend
    stakes.register(A, "worker")
    stakes.stake(A, 70)
    stakes.stake(A, 30)
    for amount in (0, 101):
        with pytest.raises(LedgerError):
            stakes.unstake(A, amount)
    with pytest.raises(LedgerError):
        stakes.stake(A, 0)
    stakes.unstake(A, 40)
    assert (known(stakes).stake, known(stakes).leaving) == (60, 40)
    passes(UNSTAKE_S - 100)
    with pytest.raises(LedgerError):
        stakes.withdraw(A)
    passes(200)
    stakes.withdraw(A)
    with pytest.raises(LedgerError):
        stakes.withdraw(A)
    assert (known(stakes).stake, known(stakes).leaving) == (60, 0)


def test_work_is_credited_once(backend: Backend) -> None:
    stakes, _ = backend
    stakes.register(A, "worker")
    stakes.register(B, "worker")
    stakes.credit(A, "w-1", 12)
    for key in (A, B):
        with pytest.raises(LedgerError):
            stakes.credit(key, "w-1", 12)
    stakes.credit(A, "w-2", 5)
    assert known(stakes).credit == 17 and known(stakes, B).credit == 0


def test_slashing_takes_what_is_staked_and_leaving_for_the_pool(backend: Backend) -> None:
    stakes, passes = backend
    stakes.register(A, "worker")
    stakes.register(B, "worker")
    stakes.stake(A, 100)
    stakes.stake(B, 7)
    stakes.unstake(A, 40)
    stakes.slash(A, "w-1", DIGEST)
    assert stakes.pool() == 100
    assert (known(stakes).stake, known(stakes).leaving) == (0, 0)
    assert known(stakes, B).stake == 7, "nobody else gains or loses"
    with pytest.raises(LedgerError):
        stakes.slash(A, "w-1", DIGEST)
    passes(UNSTAKE_S + 100)
    with pytest.raises(LedgerError):
        stakes.withdraw(A)
    stakes.slash(A, "w-2", DIGEST)
    assert stakes.pool() == 100, "there was nothing left"


@pytest.mark.parametrize("backend", ["pyrevm", "anvil"], indirect=True)
def test_a_contracts_events_come_in_order(backend: Backend) -> None:
    stakes, passes = backend
    assert isinstance(stakes, EvmStakes)
    stakes.register(A, "worker")
    stakes.stake(A, 10)
    stakes.unstake(A, 4)
    stakes.credit(A, "w-1", 3)
    passes(UNSTAKE_S + 100)
    stakes.withdraw(A)
    stakes.slash(A, "w-2", DIGEST)
    found = list(stakes.events())
    assert [(event.kind, event.key, event.work, event.amount) for event in found] == [
        ("registered", A, "worker", 0),
        ("staked", A, "", 10),
        ("unstaked", A, "", 4),
        ("credited", A, "w-1", 3),
        ("withdrawn", A, "", 4),
        ("slashed", A, "w-2", 6),
    ]
    cursors = [event.cursor for event in found]
    assert cursors == sorted(set(cursors))


def test_a_deposit_waits_for_registration_and_can_be_taken_back_until_then(backend: Backend) -> None:
    stakes, _ = backend
    stakes.deposit(A, 40)
    stakes.deposit(A, 60)
    stakes.deposit(B, 7)
    assert (stakes.deposited(A), stakes.deposited(B), stakes.account(A), stakes.pool()) == (100, 7, None, 0)
    stakes.reclaim(B)
    for act in (lambda: stakes.reclaim(B), lambda: stakes.deposit(B, 0), lambda: stakes.slash(A, "w-1", DIGEST)):
        with pytest.raises(LedgerError):
            act()
    stakes.register(A, "worker")
    assert (stakes.deposited(A), known(stakes).stake) == (0, 100)
    for act in (lambda: stakes.reclaim(A), lambda: stakes.deposit(A, 5)):
        with pytest.raises(LedgerError):
            act()
    stakes.slash(A, "w-1", DIGEST)
    assert stakes.pool() == 100
    if isinstance(stakes, LedgerStakes):
        return
    found = [(event.kind, event.key, event.amount) for event in stakes.events()]
    assert found == [
        ("deposited", A, 40),
        ("deposited", A, 60),
        ("deposited", B, 7),
        ("reclaimed", B, 7),
        ("registered", A, 100),
        ("slashed", A, 100),
    ]


def test_the_accounts_follow_a_ledger_whose_transaction_was_undone() -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    ledger = Ledger(SqliteConnection(connection), Identity.generate(), clock=lambda: 5)
    stakes = LedgerStakes(ledger, lambda: 5)
    stakes.register(A, "worker")
    stakes.stake(A, 10)
    connection.execute("BEGIN")
    stakes.stake(A, 90)
    assert known(stakes).stake == 100
    connection.execute("ROLLBACK")
    assert known(stakes).stake == 10
    connection.execute("BEGIN")
    ledger.append("staked", {"key": A, "amount": 90})
    assert known(stakes).stake == 100
    connection.execute("ROLLBACK")
    ledger.append("staked", {"key": A, "amount": 3})
    assert known(stakes).stake == 13


# --- the contract ----------------------------------------------------------------------------------------------------


STRANGER = "0x" + "22" * 20
A = "a1" * 32


def test_the_committed_bytecode_is_what_the_source_compiles_to() -> None:
    vyper = pytest.importorskip("vyper", reason="the compiler is not installed: make evm")
    found = artifact()
    assert vyper.__version__.startswith(found["vyper"]), "compile the contract again with this compiler"
    source = files("shoal.ledger").joinpath("stakes.vy").read_text()
    made = vyper.compile_code(source, output_formats=["abi", "bytecode"])
    assert (made["abi"], made["bytecode"]) == (found["abi"], found["bytecode"])


def test_nobody_but_the_operator_and_the_payer_moves_anything() -> None:
    pytest.importorskip("pyrevm", reason="pyrevm is not installed: make evm")
    pytest.importorskip("eth_abi", reason="web3.py is not installed: make evm")
    chain = RevmChain()
    address = deploy(chain)
    stakes = EvmStakes(chain, address)
    stakes.register(A, "worker")
    stakes.stake(A, 100)
    stakes.slash(A, "w-1", "cd" * 32)
    operator_before = chain.evm.get_balance(ACCOUNT)

    class Stranger(RevmChain):
        address = STRANGER

        def __init__(self) -> None:
            self.evm, self._logs = chain.evm, []

        def transact(self, to: str, data: bytes, value: int = 0) -> None:
            try:
                self.evm.message_call(STRANGER, to, calldata=data, value=value)
            except RuntimeError as error:
                raise LedgerError(str(error)) from error

    chain.evm.set_balance(STRANGER, 10**20)
    other = EvmStakes(Stranger(), address)
    other.deposit("c3" * 32, 5)
    stakes.deposit("c3" * 32, 7)
    stakes.register("c3" * 32, "worker")
    assert (stakes.account("c3" * 32).stake, other.deposited("c3" * 32)) == (7, 5), "the registered payer's only"  # type: ignore[union-attr]
    stakes.slash("c3" * 32, "w-9", "cd" * 32)
    other.reclaim("c3" * 32)
    for act in (
        lambda: other.register("b2" * 32, "worker"),
        lambda: other.stake(A, 1),
        lambda: other.unstake(A, 1),
        lambda: other.withdraw(A),
        lambda: other.credit(A, "w-2", 5),
        lambda: other.slash(A, "w-2", "cd" * 32),
    ):
        with pytest.raises(LedgerError):
            act()
    assert stakes.pool() == 107
    assert chain.evm.get_balance(address) == 107, "slashed stake stays in the contract"
    assert chain.evm.get_balance(ACCOUNT) == operator_before - 7, "the slasher gets nothing"

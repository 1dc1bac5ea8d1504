"""All backends of the accounts follow the same rules: the ledger, the contract on pyrevm, and the contract on anvil."""

import sqlite3
from collections.abc import Callable, Iterator
from importlib.resources import files

import pytest

from shoal.ledger.chain import LedgerError
from shoal.ledger.connection import SqliteConnection
from shoal.ledger.evm import artifact, deploy
from shoal.ledger.stakes import UNSTAKE_S, Account, Book, Event
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Identity

from .stakes_support import ACCOUNT, BACKENDS, Backend, InContract, InLedger, RevmChain, Stakes, revm_chain

A, B, DIGEST = "a1" * 32, "b2" * 32, "cd" * 32


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with BACKENDS[request.param]() as backend:
        yield backend


def account(stakes: Stakes, key: str = A) -> Account:
    account = stakes.account(key)
    assert account is not None
    return account


def refused(*actions: Callable[[], None]) -> None:
    for action in actions:
        with pytest.raises(LedgerError):
            action()


def test_a_key_registers_once_and_must_do_so_before_it_stakes_or_earns(backend: Backend) -> None:
    stakes, _ = backend
    assert stakes.account(A) is None
    refused(lambda: stakes.stake(A, 5), lambda: stakes.credit(A, "w-1", 3), lambda: stakes.slash(A, "w-1", DIGEST))
    stakes.register(A, "worker")
    refused(lambda: stakes.register(A, "validator"), lambda: stakes.register(B, ""))
    assert account(stakes) == Account("worker")


def test_stake_can_be_withdrawn_once_and_only_after_unstake_s(backend: Backend) -> None:
    stakes, advance = backend
    stakes.register(A, "worker")
    stakes.stake(A, 70)
    stakes.stake(A, 30)
    refused(lambda: stakes.unstake(A, 0), lambda: stakes.unstake(A, 101), lambda: stakes.stake(A, 0))
    stakes.unstake(A, 40)
    assert (account(stakes).stake, account(stakes).leaving) == (60, 40)
    advance(UNSTAKE_S - 100)
    refused(lambda: stakes.withdraw(A))
    advance(200)
    stakes.withdraw(A)
    refused(lambda: stakes.withdraw(A))
    assert (account(stakes).stake, account(stakes).leaving) == (60, 0)


def test_work_is_credited_once(backend: Backend) -> None:
    stakes, _ = backend
    stakes.register(A, "worker")
    stakes.register(B, "worker")
    stakes.credit(A, "w-1", 12)
    refused(lambda: stakes.credit(A, "w-1", 12), lambda: stakes.credit(B, "w-1", 12))
    stakes.credit(A, "w-2", 5)
    assert account(stakes).credit == 17 and account(stakes, B).credit == 0


def test_the_ledger_refuses_a_credit_without_work() -> None:
    book = Book()
    book.apply(Event("registered", A, "worker"), 0)
    with pytest.raises(LedgerError, match="names no work"):
        book.apply(Event("credited", A, "", 3), 0)
    assert book.accounts[A].credit == 0


def test_slashing_takes_staked_and_unstaked_amounts_for_the_pool(backend: Backend) -> None:
    stakes, advance = backend
    stakes.register(A, "worker")
    stakes.register(B, "worker")
    stakes.stake(A, 100)
    stakes.stake(B, 7)
    stakes.unstake(A, 40)
    stakes.slash(A, "w-1", DIGEST)
    assert stakes.pool() == 100
    assert (account(stakes).stake, account(stakes).leaving) == (0, 0)
    assert account(stakes, B).stake == 7, "another member's stake changed"
    refused(lambda: stakes.slash(A, "w-1", DIGEST))
    advance(UNSTAKE_S + 100)
    refused(lambda: stakes.withdraw(A))
    stakes.slash(A, "w-2", DIGEST)
    assert stakes.pool() == 100, "a second slash must add nothing, because nothing is at risk any more"


@pytest.mark.parametrize("backend", ["pyrevm", "anvil"], indirect=True)
def test_a_contract_reports_events_in_order(backend: Backend) -> None:
    stakes, advance = backend
    assert isinstance(stakes, InContract)
    stakes.register(A, "worker")
    stakes.stake(A, 10)
    stakes.unstake(A, 4)
    stakes.credit(A, "w-1", 3)
    advance(UNSTAKE_S + 100)
    stakes.withdraw(A)
    stakes.slash(A, "w-2", DIGEST)
    assert [(event.kind, event.key, event.work, event.amount) for event in stakes.events()] == [
        ("registered", A, "worker", 0),
        ("staked", A, "", 10),
        ("unstaked", A, "", 4),
        ("credited", A, "w-1", 3),
        ("withdrawn", A, "", 4),
        ("slashed", A, "w-2", 6),
    ]


def test_a_deposit_becomes_stake_at_registration_and_can_be_reclaimed_before_that(backend: Backend) -> None:
    stakes, _ = backend
    stakes.deposit(A, 40)
    stakes.deposit(A, 60)
    stakes.deposit(B, 7)
    assert (stakes.deposited(A), stakes.deposited(B), stakes.account(A), stakes.pool()) == (100, 7, None, 0)
    stakes.reclaim(B)
    refused(lambda: stakes.reclaim(B), lambda: stakes.deposit(B, 0), lambda: stakes.slash(A, "w-1", DIGEST))
    stakes.register(A, "worker")
    assert (stakes.deposited(A), account(stakes).stake) == (0, 100)
    refused(lambda: stakes.reclaim(A), lambda: stakes.deposit(A, 5))
    stakes.slash(A, "w-1", DIGEST)
    assert stakes.pool() == 100
    if isinstance(stakes, InLedger):
        return
    assert [(event.kind, event.key, event.amount) for event in stakes.events()] == [
        ("deposited", A, 40),
        ("deposited", A, 60),
        ("deposited", B, 7),
        ("reclaimed", B, 7),
        ("registered", A, 100),
        ("slashed", A, 100),
    ]


def test_a_rollback_of_the_ledger_also_undoes_its_entries_in_the_accounts() -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    ledger = Ledger(SqliteConnection(connection), Identity.generate(), clock=lambda: 5)
    stakes = InLedger(ledger, lambda: 5)
    stakes.register(A, "worker")
    stakes.stake(A, 10)
    connection.execute("BEGIN")
    stakes.stake(A, 90)
    assert account(stakes).stake == 100
    connection.execute("ROLLBACK")
    assert account(stakes).stake == 10
    connection.execute("BEGIN")
    ledger.append("staked", {"key": A, "amount": 90})
    assert account(stakes).stake == 100
    connection.execute("ROLLBACK")
    ledger.append("staked", {"key": A, "amount": 3})
    assert account(stakes).stake == 13


# --- the contract ----------------------------------------------------------------------------------------------------

STRANGER = "0x" + "22" * 20


def test_the_committed_bytecode_is_what_the_source_compiles_to() -> None:
    vyper = pytest.importorskip("vyper", reason="the compiler is not installed: make evm")
    committed = artifact()
    assert vyper.__version__.startswith(committed["vyper"]), (
        "compile the contract again, because its compiler was another version"
    )
    source = files("shoal.ledger").joinpath("stakes.vy").read_text()
    compiled = vyper.compile_code(source, output_formats=["abi", "bytecode"])
    assert (compiled["abi"], compiled["bytecode"]) == (committed["abi"], committed["bytecode"])


def test_a_stranger_can_only_reclaim_its_own_deposit() -> None:
    chain = revm_chain()
    address = deploy(chain)
    stakes = InContract(chain, address)
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
    other = InContract(Stranger(), address)
    other.deposit("c3" * 32, 5)
    stakes.deposit("c3" * 32, 7)
    stakes.register("c3" * 32, "worker")
    assert (account(stakes, "c3" * 32).stake, other.deposited("c3" * 32)) == (7, 5), (
        "only the payer's own deposit must be staked"
    )
    stakes.slash("c3" * 32, "w-9", "cd" * 32)
    other.reclaim("c3" * 32)
    refused(
        lambda: other.register("b2" * 32, "worker"),
        lambda: other.stake(A, 1),
        lambda: other.unstake(A, 1),
        lambda: other.withdraw(A),
        lambda: other.credit(A, "w-2", 5),
        lambda: other.slash(A, "w-2", "cd" * 32),
    )
    assert stakes.pool() == 107
    assert chain.evm.get_balance(address) == 107, "slashed stake must stay in the contract"
    assert chain.evm.get_balance(ACCOUNT) == operator_before - 7, "the slasher must get nothing"


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), 0.5, 5.0, True, "5", -1, None])
@pytest.mark.parametrize("kind", ["deposited", "credited"])
def test_an_amount_that_is_not_a_whole_number_changes_no_account(kind: str, amount: object) -> None:
    """NaN is not at most 0, so a comparison alone would let it pass."""
    book = Book()
    book.apply(Event("registered", B, "worker"), 0)
    key = A if kind == "deposited" else B
    with pytest.raises(LedgerError, match="not a whole number"):
        book.apply(Event(kind, key, "w-1", amount), 0)  # type: ignore[arg-type]
    assert book.deposits == {} and book.accounts == {B: Account("worker")}

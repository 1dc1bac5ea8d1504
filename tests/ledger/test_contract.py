from importlib.resources import files

import pytest

from shoal.ledger.chain import LedgerError
from shoal.ledger.evm import EvmStakes, artifact, deploy

from .stakes_support import ACCOUNT, RevmChain

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

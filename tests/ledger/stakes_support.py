"""The backends of a pool's accounts: the ledger, pyrevm and anvil, each with a clock that tests set."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shoal.ledger.chain import LedgerError
from shoal.ledger.connection import open_sqlite
from shoal.ledger.evm import EvmStakes, deploy
from shoal.ledger.stakes import LedgerStakes
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Identity

START_S = 2_000_000_000
ACCOUNT = "0x" + "11" * 20


class InLedger(LedgerStakes):
    """Accounts in the ledger, with methods that append the entries which a coordinator would append."""

    def register(self, key: str, role: str) -> None:
        self._append("registered", key=key, role=role)

    def credit(self, key: str, work: str, tokens: int) -> None:
        self._append("credited", worker=key, submissions=[work], tokens=tokens)

    def slash(self, key: str, work: str, evidence: str) -> None:
        self._append("slashed", worker=key, submission=work, evidence=evidence)

    def pool(self) -> int:
        return self.book().pool


class InContract(EvmStakes):
    def pool(self) -> int:
        return int(self._call("pool()", "uint256"))


Stakes = InLedger | InContract
Backend = tuple[Stakes, Callable[[int], None]]  # accounts, and a function that advances their clock by seconds


@contextmanager
def on_sqlite() -> Iterator[Backend]:
    now_s = [START_S]
    ledger = Ledger(open_sqlite(":memory:"), Identity.generate(), clock=lambda: now_s[0])

    def advance(seconds: int) -> None:
        now_s[0] += seconds

    yield InLedger(ledger, lambda: now_s[0]), advance


class RevmChain:
    """An EVM in this process."""

    address = ACCOUNT

    def __init__(self) -> None:
        from pyrevm import EVM

        self.evm: Any = EVM()
        self.evm.set_balance(ACCOUNT, 10**24)
        self._logs: list[bytes] = []

    def deploy(self, code: bytes) -> str:
        return str(self.evm.deploy(ACCOUNT, code))

    def transact(self, to: str, data: bytes, value: int = 0) -> None:
        try:
            self.evm.message_call(ACCOUNT, to, calldata=data, value=value)
        except RuntimeError as error:
            raise LedgerError(f"the contract refuses: {error}") from error
        self._logs += [bytes(log.data[1]) for log in self.evm.result.logs]

    def call(self, to: str, data: bytes) -> bytes:
        return bytes(self.evm.message_call(ACCOUNT, to, calldata=data, is_static=True))

    def logs(self, of: str) -> Sequence[bytes]:
        return self._logs


def revm_chain() -> RevmChain:
    """Skip the test if pyrevm or web3.py is not installed."""
    pytest.importorskip("pyrevm", reason="pyrevm is not installed: make evm")
    pytest.importorskip("eth_abi", reason="web3.py is not installed: make evm")
    return RevmChain()


@contextmanager
def on_pyrevm() -> Iterator[Backend]:
    chain, now_s = revm_chain(), [START_S]
    from pyrevm import BlockEnv

    def advance(seconds: int) -> None:
        now_s[0] += seconds
        chain.evm.set_block_env(BlockEnv(timestamp=now_s[0]))

    advance(0)
    yield InContract(chain, deploy(chain)), advance


def anvil_binary() -> str | None:
    """Return the path of anvil: $SHOAL_ANVIL, the one on the path, or the one that `make evm` installs."""
    built = next((Path(__file__).parents[2] / ".evm" / "node_modules").glob("@foundry-rs/anvil-*/bin/anvil"), None)
    return os.environ.get("SHOAL_ANVIL") or shutil.which("anvil") or (str(built) if built else None)


@contextmanager
def anvil_node() -> Iterator[str]:
    """Run a chain and yield the URL of its node. Skip the test if anvil is not installed."""
    binary = anvil_binary()
    if binary is None or not Path(binary).exists():
        pytest.skip("anvil is not installed: make evm")
    if find_spec("web3") is None:  # not imported here, because it changes the recursion limit of the process
        pytest.skip("web3.py is not installed: make evm")

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([binary, "--port", str(port), "--silent"])
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process)
        yield url
    finally:
        process.terminate()
        process.wait()


@contextmanager
def on_anvil() -> Iterator[Backend]:
    with anvil_node() as url:
        from shoal.ledger.evm import Web3Chain

        chain = Web3Chain(url, poll_s=0.01)

        def advance(seconds: int) -> None:
            chain.web3.provider.make_request("evm_increaseTime", [seconds])
            chain.web3.provider.make_request("evm_mine", [])

        yield InContract(chain, deploy(chain)), advance


def _wait(url: str, process: "subprocess.Popen[bytes]") -> None:
    from shoal.ledger.evm import Web3Chain

    deadline_s = time.monotonic() + 60
    while True:
        try:
            Web3Chain(url)
            return
        except LedgerError:
            assert process.poll() is None and time.monotonic() < deadline_s, "anvil does not answer"
            time.sleep(0.02)


BACKENDS = {"sqlite": on_sqlite, "pyrevm": on_pyrevm, "anvil": on_anvil}

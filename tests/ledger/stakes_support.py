"""The backends of the accounts that the conformance suite runs on, each with a clock that tests set."""

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
Stakes = LedgerStakes | EvmStakes
Backend = tuple[Stakes, Callable[[int], None]]  # and: let so many seconds pass
ACCOUNT = "0x" + "11" * 20


@contextmanager
def on_sqlite() -> Iterator[Backend]:
    now_s = [START_S]
    ledger = Ledger(open_sqlite(":memory:"), Identity.generate(), clock=lambda: now_s[0])

    def passes(seconds: int) -> None:
        now_s[0] += seconds

    yield LedgerStakes(ledger, lambda: now_s[0]), passes


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


@contextmanager
def on_pyrevm() -> Iterator[Backend]:
    pytest.importorskip("pyrevm", reason="pyrevm is not installed: make evm")
    pytest.importorskip("eth_abi", reason="web3.py is not installed: make evm")
    from pyrevm import BlockEnv

    chain, now_s = RevmChain(), [START_S]

    def passes(seconds: int) -> None:
        now_s[0] += seconds
        chain.evm.set_block_env(BlockEnv(timestamp=now_s[0]))

    passes(0)
    yield EvmStakes(chain, deploy(chain)), passes


def anvil_binary() -> str | None:
    """`anvil` where $SHOAL_ANVIL names it, on the path, or where `make evm` puts it."""
    here = next((Path(__file__).parents[2] / ".evm" / "node_modules").glob("@foundry-rs/anvil-*/bin/anvil"), None)
    return os.environ.get("SHOAL_ANVIL") or shutil.which("anvil") or (str(here) if here else None)


@contextmanager
def anvil_node() -> Iterator[str]:
    """A chain for one test; yields the URL of its node. Skips the test if there is no anvil."""
    binary = anvil_binary()
    if binary is None or not Path(binary).exists():
        pytest.skip("anvil is not installed: make evm")
    if find_spec("web3") is None:  # not imported here: it changes the process's limit of recursion
        pytest.skip("web3.py is not installed: make evm")

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([binary, "--port", str(port), "--silent"])
    try:
        url = f"http://127.0.0.1:{port}"
        _connected(url, process)
        yield url
    finally:
        process.terminate()
        process.wait()


@contextmanager
def on_anvil() -> Iterator[Backend]:
    with anvil_node() as url:
        from shoal.ledger.evm import Web3Chain

        chain = Web3Chain(url, poll_s=0.01)

        def passes(seconds: int) -> None:
            chain.web3.provider.make_request("evm_increaseTime", [seconds])
            chain.web3.provider.make_request("evm_mine", [])

        yield EvmStakes(chain, deploy(chain)), passes


def _connected(url: str, process: "subprocess.Popen[bytes]") -> None:
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

"""A chain behind JSON-RPC, through web3.py: the real one of a pool, or a node of this machine.

Invariant: a transaction counts once it is in a block and succeeded. Whatever a node does or answers, a LedgerError comes of
it. Called by whoever runs a pool with the extra `evm`.
Left out: reorganisations (wait for more blocks where the chain has them), and fees that rise while a transaction waits.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from shoal.ledger.interface import LedgerError

ANSWER_S = 10.0
WAIT_S = 120.0
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)  # of a wrong answer


class ChainLostError(LedgerError):
    """The chain does not answer, or nonsense. What was sent may be in a block all the same: ask before sending it again."""

    restart_helps = True


class Web3Chain:
    def __init__(self, url: str, *, private_key: str = "", poll_s: float = 0.1) -> None:
        """Without a private key the node's own first account sends. Raises ChainLostError if it is out of reach."""
        limit = sys.getrecursionlimit()
        try:
            from web3 import Web3
        except ImportError as error:
            raise LedgerError("a chain needs web3.py: pip install 'shoal[evm]'") from error
        finally:
            sys.setrecursionlimit(limit)  # a library of it allows 100,000 levels: nested JSON then ends the process
        self.web3: Any = Web3(Web3.HTTPProvider(url, request_kwargs={"timeout": ANSWER_S}))
        self._url = url
        self._signer = self.web3.eth.account.from_key(private_key) if private_key else None
        self._poll_s = poll_s
        with self._named_errors():
            self.web3.eth.chain_id  # noqa: B018 - a question that every chain answers

    @property
    def address(self) -> str:
        with self._named_errors():
            return str(self._signer.address if self._signer else self.web3.eth.accounts[0])

    def deploy(self, code: bytes) -> str:
        receipt = self._final({"data": code})
        with self._named_errors():
            return self._checked(receipt.contractAddress)

    def transact(self, to: str, data: bytes, value: int = 0) -> None:
        self._final({"to": self._checked(to), "data": data, "value": value})

    def call(self, to: str, data: bytes) -> bytes:
        with self._named_errors():
            return bytes(self.web3.eth.call({"to": self._checked(to), "data": data}))

    def logs(self, of: str) -> Sequence[bytes]:
        with self._named_errors():
            return [bytes(log.data) for log in self.web3.eth.get_logs({"address": self._checked(of), "fromBlock": 0})]

    def _final(self, transaction: dict[str, Any]) -> Any:
        eth = self.web3.eth
        with self._named_errors():
            if self._signer:
                nonce = eth.get_transaction_count(self.address, "pending")
                whole = {"from": self.address, "nonce": nonce, "chainId": eth.chain_id, "gasPrice": eth.gas_price}
                whole |= transaction
                whole["gas"] = eth.estimate_gas(whole)
                sent = eth.send_raw_transaction(self._signer.sign_transaction(whole).raw_transaction)
            else:
                sent = eth.send_transaction({"from": self.address} | transaction)
            receipt = eth.wait_for_transaction_receipt(sent, timeout=WAIT_S, poll_latency=self._poll_s)
            if receipt.status != 1:
                raise LedgerError(f"the transaction {sent.hex()} failed")
        return receipt

    def _checked(self, address: str) -> str:
        return str(self.web3.to_checksum_address(address))

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        from web3.exceptions import ContractLogicError, TimeExhausted, Web3Exception, Web3RPCError

        try:
            yield
        except LedgerError:
            raise
        except TimeExhausted as error:
            raise ChainLostError(f"the chain at {_host(self._url)} made no block in {WAIT_S:.0f} s: {error}") from error
        except (ContractLogicError, Web3RPCError) as error:
            raise LedgerError(f"the contract refuses: {error}") from error
        except OSError as error:  # of the HTTP client
            raise ChainLostError(
                f"the chain at {_host(self._url)} does not answer ({type(error).__name__}): start its node, or name another"
            ) from error
        except (Web3Exception, *UNREADABLE) as error:
            raise ChainLostError(
                f"the chain at {_host(self._url)} answers nonsense ({type(error).__name__}): name another node of it"
            ) from error


def _host(url: str) -> str:
    """A provider's URL often holds a key, which no message shows."""
    return urlsplit(url).netloc.rpartition("@")[2]

"""A chain behind JSON-RPC, through web3.py: the real one of a pool, or a node of this machine.

Invariant: a transaction counts once it is in a block and succeeded. Called by whoever runs a pool with the extra `evm`.
Left out: reorganisations (wait for more blocks where the chain has them), and fees that rise while a transaction waits.
"""

from collections.abc import Sequence
from typing import Any

from shoal.ledger.interface import LedgerError

WAIT_S = 120.0


class Web3Chain:
    def __init__(self, url: str, *, private_key: str = "", poll_s: float = 0.1) -> None:
        """Without a private key the node's own first account sends. Raises LedgerError if the chain is out of reach."""
        try:
            from web3 import Web3
        except ImportError as error:
            raise LedgerError("a chain needs web3.py: pip install 'shoal[evm]'") from error
        self.web3: Any = Web3(Web3.HTTPProvider(url, request_kwargs={"timeout": 30}))
        if not self.web3.is_connected():
            raise LedgerError(f"no chain answers at {url}: start its node, or name another URL")
        self._signer = self.web3.eth.account.from_key(private_key) if private_key else None
        self._poll_s = poll_s

    @property
    def address(self) -> str:
        return str(self._signer.address if self._signer else self.web3.eth.accounts[0])

    def deploy(self, code: bytes) -> str:
        return str(self._final({"data": code}).contractAddress)

    def transact(self, to: str, data: bytes, value: int = 0) -> None:
        self._final({"to": to, "data": data, "value": value})

    def call(self, to: str, data: bytes) -> bytes:
        return bytes(self.web3.eth.call({"to": to, "data": data}))

    def logs(self, of: str) -> Sequence[bytes]:
        return [bytes(log.data) for log in self.web3.eth.get_logs({"address": of, "fromBlock": 0})]

    def _final(self, transaction: dict[str, Any]) -> Any:
        from web3.exceptions import ContractLogicError, TimeExhausted, Web3RPCError

        eth = self.web3.eth
        try:
            if self._signer:
                nonce = eth.get_transaction_count(self.address, "pending")
                whole = {"from": self.address, "nonce": nonce, "chainId": eth.chain_id, "gasPrice": eth.gas_price}
                whole |= transaction
                whole["gas"] = eth.estimate_gas(whole)
                sent = eth.send_raw_transaction(self._signer.sign_transaction(whole).raw_transaction)
            else:
                sent = eth.send_transaction({"from": self.address} | transaction)
            receipt = eth.wait_for_transaction_receipt(sent, timeout=WAIT_S, poll_latency=self._poll_s)
        except (ContractLogicError, Web3RPCError) as error:
            raise LedgerError(f"the contract refuses: {error}") from error
        except TimeExhausted as error:
            raise LedgerError(f"a transaction is in no block after {WAIT_S:.0f} s; see it: {sent.hex()}") from error
        if receipt.status != 1:
            raise LedgerError(f"the transaction {sent.hex()} failed")
        return receipt

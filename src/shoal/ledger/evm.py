"""A pool's accounts in a contract on an EVM chain, and how a ledger is settled there.

    stakes.vy      the contract, in Vyper        stakes.json   its ABI and bytecode; a test compares them with stakes.vy
    EvmStakes      the accounts of `shoal.ledger.stakes` in a contract
    Web3Chain      calls and transactions of one account, through a node's JSON-RPC; tests use an in-process EVM instead

Invariants: a transaction that the contract refuses changes nothing and raises LedgerError with the contract's reason. A
transaction counts once it has succeeded in a block. Every fault of a node raises a LedgerError. An answer that no
contract of Shoal would give raises a ChainLostError. A private key file that others may read is refused. Importing this
module needs no extra; opening a chain needs the extra `evm`.

Settling copies the ledger's entries about accounts into the contract, one by one and in order:

    registered   register(key, role, payer)                  a key is registered once, by the first run to settle it
    credited     credit(worker, entry digest, tokens)        a digest is credited once
    slashed      slash(worker, entry digest, hash of the rejected file)

The contract refuses an entry that it already has. The settler also asks, before it sends an entry, whether the contract
has it. So if the settler crashes, repeats itself or misses an answer, each entry still counts once. Because the
contract stores the entries' digests, a ledger that lacks one of them is not the ledger that was settled.
Left out: several entries in one transaction; reorganisations of the chain (where these happen, wait for more blocks
before you rely on an entry); fees that rise while a transaction waits.
"""

import re
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from json import loads
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shoal.errors import check_extra
from shoal.ledger.chain import Entry, LedgerError
from shoal.ledger.stakes import UNSTAKE_S, Account, Event

ENTRY = ("uint256", "string", "bytes32", "string", "uint256", "bytes32")  # the fields of the contract's one event
ACCOUNT = "(string,address,uint256,uint256,uint256,uint256)"
NO_KEY = b"\0" * 32
KEY = re.compile("[0-9a-fA-F]{64}")
ANSWER_S = 10.0
WAIT_S = 120.0
# Errors that reading a malformed answer can raise.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
KINDS = ("registered", "credited", "slashed")
NO_PAYER = "0x" + "00" * 20  # a member with this payer has none: nobody can stake for it


class ChainLostError(LedgerError):
    """The chain gives no answer, or an invalid one. A transaction may be in a block anyway, so check before a retry."""

    restart_helps = True


@cache
def artifact() -> dict[str, Any]:
    """Return the committed ABI, bytecode and compiler version."""
    contents: dict[str, Any] = loads(files("shoal.ledger").joinpath("stakes.json").read_text())
    return contents


def deploy(chain: "Web3Chain") -> str:
    """Deploy a contract whose operator is the chain's account. Return its address."""
    code = bytes.fromhex(artifact()["bytecode"].removeprefix("0x"))
    return chain.deploy(code + _encode(["uint256"], [UNSTAKE_S]))


class EvmStakes:
    def __init__(self, chain: "Web3Chain", address: str) -> None:
        self.chain = chain
        self.address = address

    def deposit(self, key: str, amount: int) -> None:
        self._send("deposit(bytes32)", bytes.fromhex(key), value=amount)

    def reclaim(self, key: str) -> None:
        self._send("reclaim(bytes32)", bytes.fromhex(key))

    def register(self, key: str, role: str, payer: str = "") -> None:
        self._send("register(bytes32,string,address)", bytes.fromhex(key), role, payer or self.chain.address)

    def stake(self, key: str, amount: int) -> None:
        self._send("stake(bytes32)", bytes.fromhex(key), value=amount)

    def unstake(self, key: str, amount: int) -> None:
        self._send("unstake(bytes32,uint256)", bytes.fromhex(key), amount)

    def withdraw(self, key: str) -> None:
        self._send("withdraw(bytes32)", bytes.fromhex(key))

    def credit(self, key: str, work: str, tokens: int) -> None:
        self._send("credit(bytes32,string,uint256)", bytes.fromhex(key), work, tokens)

    def slash(self, key: str, work: str, evidence: str) -> None:
        """`evidence`: the hash of the rejected file."""
        self._send("slash(bytes32,string,bytes32)", bytes.fromhex(key), work, bytes.fromhex(evidence))

    def account(self, key: str) -> Account | None:
        role, _, stake, leaving, leaves_s, credit = self._call("accounts(bytes32)", ACCOUNT, bytes.fromhex(key))
        return Account(role, stake, leaving, leaves_s, credit) if role else None

    def deposited(self, key: str, payer: str = "") -> int:
        arguments = bytes.fromhex(key), payer or self.chain.address
        return int(self._call("deposits(bytes32,address)", "uint256", *arguments))

    def is_paid(self, work: str) -> bool:
        return bool(self._call("paid(string)", "bool", work))

    def is_slashed(self, work: str) -> bool:
        return bool(self._call("slashed(string)", "bytes32", work) != NO_KEY)

    def operator(self) -> str:
        """Return the account that may register, credit and slash. Raise LedgerError if there is no Shoal contract."""
        answer = self.chain.call(self.address, _calldata("operator()", []))
        if len(answer) != 32:
            raise LedgerError(
                f"no contract of Shoal at {self.address} on this chain: make one with `shoal pool stake deploy`"
            )
        return "0x" + answer[12:].hex()

    def events(self) -> Iterator[Event]:
        """Yield the contract's events, oldest first."""
        for data in self.chain.logs(self.address):
            _, kind, key, work, amount, _ = _decode(ENTRY, data, "its events")
            yield Event(kind, key.hex(), work, amount)

    def _send(self, signature: str, *arguments: Any, value: int = 0) -> None:
        self.chain.transact(self.address, _calldata(signature, arguments), value)

    def _call(self, signature: str, result: str, *arguments: Any) -> Any:
        """Call a function that changes nothing; `result` is the type of its answer."""
        [answer] = _decode([result], self.chain.call(self.address, _calldata(signature, arguments)), signature)
        return answer


class Web3Chain:
    def __init__(self, url: str, *, private_key: str = "", poll_s: float = 0.1) -> None:
        """Connect to a node. Without `private_key`, the node's first account sends transactions.

        Raise ChainLostError, UserError.
        """
        check_extra("evm", "a chain")
        limit = sys.getrecursionlimit()
        try:
            from web3 import Web3
        finally:
            sys.setrecursionlimit(limit)  # a dependency sets 100,000; deeply nested JSON would then crash the process
        self.web3: Any = Web3(Web3.HTTPProvider(url, request_kwargs={"timeout": ANSWER_S}))
        self._host = urlsplit(url).netloc.rpartition("@")[2]  # for messages, because the rest may hold a key
        self._signer = self.web3.eth.account.from_key(private_key) if private_key else None
        self._poll_s = poll_s
        with self._named_errors():
            self.web3.eth.chain_id  # noqa: B018 - checks that the node answers

    @property
    def address(self) -> str:
        """The account that sends transactions."""
        with self._named_errors():
            return str(self._signer.address if self._signer else self.web3.eth.accounts[0])

    def deploy(self, code: bytes) -> str:
        """Deploy a contract and return its address."""
        receipt = self._mined({"data": code})
        with self._named_errors():
            return self._checksummed(receipt.contractAddress)

    def transact(self, to: str, data: bytes, value: int = 0) -> None:
        """Send a transaction and wait until it is in a block. Raise LedgerError with the reason if the contract refuses."""
        self._mined({"to": self._checksummed(to), "data": data, "value": value})

    def call(self, to: str, data: bytes) -> bytes:
        with self._named_errors():
            return bytes(self.web3.eth.call({"to": self._checksummed(to), "data": data}))

    def logs(self, of: str) -> Sequence[bytes]:
        """Return the data of every event of a contract, oldest first."""
        with self._named_errors():
            logs = self.web3.eth.get_logs({"address": self._checksummed(of), "fromBlock": 0})
            return [bytes(log.data) for log in logs]

    def _mined(self, transaction: dict[str, Any]) -> Any:
        """Send a transaction and return its receipt once it has succeeded in a block."""
        eth = self.web3.eth
        with self._named_errors():
            if self._signer:
                nonce = eth.get_transaction_count(self.address, "pending")
                full = {"from": self.address, "nonce": nonce, "chainId": eth.chain_id, "gasPrice": eth.gas_price}
                full |= transaction
                full["gas"] = eth.estimate_gas(full)
                sent = eth.send_raw_transaction(self._signer.sign_transaction(full).raw_transaction)
            else:
                sent = eth.send_transaction({"from": self.address} | transaction)
            receipt = eth.wait_for_transaction_receipt(sent, timeout=WAIT_S, poll_latency=self._poll_s)
            if receipt.status != 1:
                raise LedgerError(f"the transaction {sent.hex()} failed")
        return receipt

    def _checksummed(self, address: str) -> str:
        return str(self.web3.to_checksum_address(address))

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        from web3.exceptions import ContractLogicError, TimeExhausted, Web3Exception, Web3RPCError

        try:
            yield
        except LedgerError:
            raise
        except TimeExhausted as error:
            raise ChainLostError(f"the chain at {self._host} made no block in {WAIT_S:.0f} s: {error}") from error
        except (ContractLogicError, Web3RPCError) as error:
            raise LedgerError(f"the contract refuses: {error}") from error
        except OSError as error:  # from the HTTP client
            raise ChainLostError(
                f"the chain at {self._host} does not answer ({type(error).__name__}): start its node, or use another"
            ) from error
        except (Web3Exception, *UNREADABLE) as error:
            raise ChainLostError(
                f"the chain at {self._host} sent an invalid answer ({type(error).__name__}): use another node"
            ) from error


def open_chain(rpc: str, key_file: str = "") -> Web3Chain:
    """Connect to a node. Without `key_file`, its first account sends transactions. Raise LedgerError or ChainLostError."""
    if not rpc:
        raise LedgerError("set the URL of the chain's node: ledger.rpc, or --rpc")
    return Web3Chain(rpc, private_key=read_key(Path(key_file)) if key_file else "")


def open_contract(rpc: str, contract: str, key_file: str = "", *, operates: bool = False) -> EvmStakes:
    """Connect to a contract; `operates`: require its operator's key. Raise LedgerError or ChainLostError."""
    chain = open_chain(rpc, key_file)
    stakes = EvmStakes(chain, contract)
    operator = stakes.operator()
    if operates and operator.lower() != chain.address.lower():
        raise LedgerError(
            f"the operator of the contract {contract} is {operator}, not {chain.address}: use the operator's key"
        )
    return stakes


def read_key(path: Path) -> str:
    """Return the private key in a file, in hex. Raise LedgerError."""
    try:
        mode, text = path.stat().st_mode, path.read_text().strip().removeprefix("0x")
    except (OSError, UnicodeDecodeError) as error:
        raise LedgerError(f"cannot read the private key in {path}: {error}") from error
    if mode & 0o077:
        raise LedgerError(f"others may read the private key in {path}: run chmod 600 {path}")
    if not KEY.fullmatch(text):
        raise LedgerError(f"{path} does not contain a private key (64 hex digits)")
    return text


def _calldata(signature: str, arguments: Sequence[Any]) -> bytes:
    from eth_utils.crypto import keccak

    name, _, types = signature.rstrip(")").partition("(")
    return bytes(keccak(text=f"{name}({types})"))[:4] + _encode(list(filter(None, types.split(","))), arguments)


def _decode(types: Sequence[str], data: bytes, what: str) -> tuple[Any, ...]:
    """Decode a node's answer. Raise ChainLostError, because a node may answer anything."""
    from eth_abi.abi import decode
    from eth_abi.exceptions import DecodingError

    try:
        values: tuple[Any, ...] = decode(types, data)
    except (DecodingError, ValueError, OverflowError) as error:
        raise ChainLostError(
            f"the chain's answer for {what} ({len(data)} bytes) is not from a contract of Shoal: use another node"
        ) from error
    return values


def _encode(types: Sequence[str], values: Sequence[Any]) -> bytes:
    from eth_abi.abi import encode

    return bytes(encode(types, values))


# --- settling --------------------------------------------------------------------------------------------------------


def unsettled(entries: Iterable[Entry], contract: EvmStakes) -> list[Entry]:
    """Find the last settled credit or slash by bisection. Return the entries of KINDS after it."""
    relevant = [entry for entry in entries if entry.kind in KINDS]
    works = [number for number, entry in enumerate(relevant) if entry.kind != "registered"]
    n_settled = bisect_left(works, True, key=lambda number: not is_settled(relevant[number], contract))
    return relevant[works[n_settled - 1] + 1 if n_settled else 0 :]


def settle(entry: Entry, contract: EvmStakes) -> bool:
    """Send an entry unless it is already settled. Return whether it was sent. Raise LedgerError; a retry may help."""
    if is_settled(entry, contract):
        return False
    try:
        _send(entry, contract)
    except LedgerError:
        if is_settled(entry, contract):  # no answer came, but this transaction or an earlier slow one has settled it
            return False
        raise
    return True


def is_settled(entry: Entry, contract: EvmStakes) -> bool:
    body = loads(entry.body)
    if entry.kind == "registered":
        return contract.account(body["key"]) is not None
    return contract.is_paid(entry.digest) if entry.kind == "credited" else contract.is_slashed(entry.digest)


def not_on_chain(entries: Sequence[Entry], events: set[tuple[str, str, str, int]], contract: EvmStakes) -> list[Entry]:
    """Return the entries of KINDS that the contract lacks or has with other content.

    `events`: the contract's events as (kind, key, work, tokens); 0 tokens for slashes.
    """
    return [
        entry
        for entry in entries
        if entry.kind in KINDS
        and (not is_settled(entry, contract) if entry.kind == "registered" else _settled_event(entry) not in events)
    ]


def _settled_event(entry: Entry) -> tuple[str, str, str, int]:
    body = loads(entry.body)
    return entry.kind, body["worker"], entry.digest, body["tokens"] if entry.kind == "credited" else 0


def _send(entry: Entry, contract: EvmStakes) -> None:
    body: dict[str, Any] = loads(entry.body)
    if entry.kind == "registered":
        contract.register(body["key"], body["role"], body.get("payer") or NO_PAYER)
    elif entry.kind == "credited":
        contract.credit(body["worker"], entry.digest, body["tokens"])
    else:
        contract.slash(body["worker"], entry.digest, body["file"])

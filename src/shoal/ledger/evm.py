"""The accounts of a pool on an EVM chain: a contract in Vyper, a chain behind JSON-RPC, and how a ledger is settled there.

    stakes.vy      the contract        stakes.json   what the compiler made of it; a test compiles it again and compares
    EvmStakes      the accounts of `shoal.ledger.stakes` in a contract, over any `EvmChain`
    Web3Chain      a node behind JSON-RPC, through web3.py: a pool's real one, or one on this machine

Invariants: the contract decides. A refused transaction changes nothing and is a LedgerError with the contract's own words;
events are read from the chain's logs, in the order of the contract's own count. A transaction counts once it is in a block
and succeeded. Whatever a node does or answers, a LedgerError comes of it; an answer that is none of the contract's is a
ChainLostError. A private key that others may read is not used. Importing this needs no extra; opening a chain needs `evm`.

Settling repeats in the contract what a pool's ledger says about accounts, entry by entry:

    registered   register(key, role, payer)                      a key is registered once, whichever run was first
    credited     credit(worker, the entry's digest, tokens)      a digest is credited once
    slashed      slash(worker, the entry's digest, the hash of the rejected file)

The contract itself refuses an entry the second time, and is asked before. So whoever settles may die, repeat itself or lose
an answer, and nothing is counted twice; entries are settled in order, so none is left out. The contract names digests: a
ledger that lacks one of them, or says otherwise there, is not the one that was settled.
Left out: several entries in one transaction; reorganisations (wait for more blocks where the chain has them); fees that rise
while a transaction waits.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from json import loads
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from shoal.ledger.chain import Entry, LedgerError
from shoal.ledger.stakes import UNSTAKE_S, Account, Event

ENTRY = ("uint256", "string", "bytes32", "string", "uint256", "bytes32")  # the fields of the contract's one event
ACCOUNT = "(string,address,uint256,uint256,uint256,uint256)"
NOBODY = b"\0" * 32
KEY = re.compile("[0-9a-fA-F]{64}")
ANSWER_S = 10.0
WAIT_S = 120.0
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)  # of a wrong answer
KINDS = ("registered", "credited", "slashed")
NO_PAYER = "0x" + "00" * 20  # of a member that named none: nobody stakes on it


class ChainLostError(LedgerError):
    """The chain does not answer, or nonsense. What was sent may be in a block all the same: ask before sending it again."""

    restart_helps = True


class EvmChain(Protocol):
    """Transactions of one account. Raises LedgerError, with the reason, for what the contract refuses."""

    @property
    def address(self) -> str:
        """Of the account that sends."""
        ...

    def deploy(self, code: bytes) -> str:
        """The new contract's address."""
        ...

    def transact(self, to: str, data: bytes, value: int = 0) -> None:
        """Returns once it is in a block."""
        ...

    def call(self, to: str, data: bytes) -> bytes: ...

    def logs(self, of: str) -> Sequence[bytes]:
        """The data of every event of a contract, oldest first."""
        ...


@cache
def artifact() -> dict[str, Any]:
    """ABI, bytecode and compiler, as committed."""
    found: dict[str, Any] = loads(files("shoal.ledger").joinpath("stakes.json").read_text())
    return found


def deploy(chain: EvmChain, *, unstake_s: int = UNSTAKE_S) -> str:
    """A new contract whose operator is the chain's account. Returns its address."""
    code = bytes.fromhex(artifact()["bytecode"].removeprefix("0x"))
    return chain.deploy(code + _encode(["uint256"], [unstake_s]))


class EvmStakes:
    def __init__(self, chain: EvmChain, address: str) -> None:
        self.chain = chain
        self.address = address

    def deposit(self, key: str, amount: int) -> None:
        if amount <= 0:
            raise LedgerError(f"{amount} is not an amount")
        self._send("deposit(bytes32)", _key(key), value=amount)

    def reclaim(self, key: str) -> None:
        self._send("reclaim(bytes32)", _key(key))

    def register(self, key: str, role: str, payer: str = "") -> None:
        self._send("register(bytes32,string,address)", _key(key), role, payer or self.chain.address)

    def stake(self, key: str, amount: int) -> None:
        if amount <= 0:
            raise LedgerError(f"{amount} is not an amount")
        self._send("stake(bytes32)", _key(key), value=amount)

    def unstake(self, key: str, amount: int) -> None:
        if amount <= 0:
            raise LedgerError(f"{amount} is not an amount")
        self._send("unstake(bytes32,uint256)", _key(key), amount)

    def withdraw(self, key: str) -> None:
        self._send("withdraw(bytes32)", _key(key))

    def credit(self, key: str, work: str, tokens: int) -> None:
        self._send("credit(bytes32,string,uint256)", _key(key), work, tokens)

    def slash(self, key: str, work: str, evidence: str) -> None:
        self._send("slash(bytes32,string,bytes32)", _key(key), work, _key(evidence))

    def account(self, key: str) -> Account | None:
        [found] = self._ask("accounts(bytes32)", [ACCOUNT], _key(key))
        role, _, stake, leaving, leaves_s, credit = found
        return Account(role, stake, leaving, leaves_s, credit) if role else None

    def deposited(self, key: str, payer: str = "") -> int:
        [found] = self._ask("deposits(bytes32,address)", ["uint256"], _key(key), payer or self.chain.address)
        return int(found)

    def is_paid(self, work: str) -> bool:
        [found] = self._ask("paid(string)", ["bool"], work)
        return bool(found)

    def is_slashed(self, work: str) -> bool:
        """Whether somebody was slashed for it."""
        [found] = self._ask("slashed(string)", ["bytes32"], work)
        return bool(found != NOBODY)

    def operator(self) -> str:
        """The account that may register, credit, slash and decide. Raises LedgerError if the contract is another one."""
        answer = self.chain.call(self.address, _call("operator()", []))
        if len(answer) != 32:
            raise LedgerError(
                f"no contract of Shoal at {self.address} on this chain: make one with `shoal pool stake deploy`"
            )
        return "0x" + answer[12:].hex()

    def pool(self) -> int:
        [found] = self._ask("pool()", ["uint256"])
        return int(found)

    def events(self) -> Iterator[Event]:
        for data in self.chain.logs(self.address):
            seq, kind, key, work, amount, _ = _decode(ENTRY, data, "its events")
            yield Event(seq, kind, key.hex(), work, amount)

    def _send(self, signature: str, *values: Any, value: int = 0) -> None:
        self.chain.transact(self.address, _call(signature, values), value)

    def _ask(self, signature: str, types: list[str], *values: Any) -> tuple[Any, ...]:
        return _decode(types, self.chain.call(self.address, _call(signature, values)), signature)


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


def open_chain(rpc: str, key_file: str = "") -> Web3Chain:
    """`key_file` "": the node's own first account sends. Raises LedgerError, ChainLostError."""
    if not rpc:
        raise LedgerError("name the chain's node: ledger.rpc, or --rpc")
    return Web3Chain(rpc, private_key=read_key(Path(key_file)) if key_file else "")


def open_contract(rpc: str, contract: str, key_file: str = "", *, operates: bool = False) -> EvmStakes:
    """`operates`: the key must be the contract's operator's. Raises LedgerError, ChainLostError."""
    chain = open_chain(rpc, key_file)
    stakes = EvmStakes(chain, contract)
    operator = stakes.operator()
    if operates and operator.lower() != chain.address.lower():
        raise LedgerError(f"the contract {contract} is operated by {operator}, not by {chain.address}: use its key")
    return stakes


def read_key(path: Path) -> str:
    """Raises LedgerError."""
    try:
        mode, text = path.stat().st_mode, path.read_text().strip().removeprefix("0x")
    except (OSError, UnicodeDecodeError) as error:
        raise LedgerError(f"cannot read the private key in {path}: {error}") from error
    if mode & 0o077:
        raise LedgerError(f"others may read the private key in {path}: chmod 600 {path}")
    if not KEY.fullmatch(text):
        raise LedgerError(f"{path} holds no private key: it is 64 digits of hex")
    return text


def _call(signature: str, values: Sequence[Any]) -> bytes:
    from eth_utils.crypto import keccak

    name, _, types = signature.rstrip(")").partition("(")
    return bytes(keccak(text=f"{name}({types})"))[:4] + _encode([kind for kind in types.split(",") if kind], values)


def _decode(types: Sequence[str], data: bytes, what: str) -> tuple[Any, ...]:
    """Raises ChainLostError: a node that lost its chain, or lies, answers anything, nothing included."""
    from eth_abi.abi import decode
    from eth_abi.exceptions import DecodingError

    try:
        found: tuple[Any, ...] = decode(types, data)
    except (DecodingError, ValueError, OverflowError) as error:
        raise ChainLostError(
            f"the chain's answer for {what} is none of the contract's ({len(data)} bytes): name another node of it"
        ) from error
    return found


def _encode(types: Sequence[str], values: Sequence[Any]) -> bytes:
    from eth_abi.abi import encode

    return bytes(encode(types, values))


def _key(key: str) -> bytes:
    return bytes.fromhex(key)


# --- settling --------------------------------------------------------------------------------------------------------


def unsettled(entries: Iterable[Entry], contract: EvmStakes) -> list[Entry]:
    """Those that are to be settled, from the first on that may not be; asks about a few of them only."""
    found = [entry for entry in entries if entry.kind in KINDS]
    works = [number for number, entry in enumerate(found) if entry.kind != "registered"]
    low, high = 0, len(works)  # those before `low` are settled, those from `high` on are not
    while low < high:
        middle = (low + high) // 2
        if is_settled(found[works[middle]], contract):
            low = middle + 1
        else:
            high = middle
    return found[works[low - 1] + 1 if low else 0 :]


def settle(entry: Entry, contract: EvmStakes) -> bool:
    """Returns whether it had to be sent. Raises LedgerError; then send it again later."""
    if is_settled(entry, contract):
        return False
    try:
        _send(entry, contract)
    except LedgerError:
        if is_settled(entry, contract):  # an earlier transaction was only slow
            return False
        raise
    return True


def is_settled(entry: Entry, contract: EvmStakes) -> bool:
    body = loads(entry.body)
    if entry.kind == "registered":
        return contract.account(body["key"]) is not None
    return contract.is_paid(entry.digest) if entry.kind == "credited" else contract.is_slashed(entry.digest)


def not_on_chain(entries: Sequence[Entry], known: set[tuple[str, str, str, int]], contract: EvmStakes) -> list[Entry]:
    """The entries that a contract does not hold as the ledger says them. `known`: its events, as kind, key, work, tokens."""
    return [
        entry
        for entry in entries
        if entry.kind in KINDS
        and (not is_settled(entry, contract) if entry.kind == "registered" else _settled_event(entry) not in known)
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

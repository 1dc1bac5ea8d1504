"""`EvmStakes`: the accounts of `shoal.ledger.stakes` in a contract, by calls that are encoded here.

Invariant: the contract decides. A refused transaction changes nothing and is a LedgerError with the contract's own words;
events are read from the chain's logs, in the order of the contract's own count. An answer that is none of the contract's is
a ChainLostError.
Called by `coordinator/credit`, `shoal stake` and the audit. `Chain` is all that differs between a node behind
JSON-RPC and an EVM in the same process.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from json import loads
from typing import Any, Protocol

from shoal.ledger.evm.web3_chain import ChainLostError
from shoal.ledger.interface import LedgerError
from shoal.ledger.stakes import APPEAL_S, UNSTAKE_S, Account, Event

ENTRY = ("uint256", "string", "bytes32", "string", "uint256", "bytes32")  # the fields of the contract's one event
ACCOUNT = "(string,address,uint256,uint256,uint256,uint256)"
NOBODY = b"\0" * 32


class Chain(Protocol):
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
    found: dict[str, Any] = loads(files("shoal.ledger.evm").joinpath("stakes.json").read_text())
    return found


def deploy(chain: Chain, *, unstake_s: int = UNSTAKE_S, appeal_s: int = APPEAL_S) -> str:
    """A new contract whose operator is the chain's account. Returns its address."""
    code = bytes.fromhex(artifact()["bytecode"].removeprefix("0x"))
    return chain.deploy(code + _encode(["uint256", "uint256"], [unstake_s, appeal_s]))


class EvmStakes:
    def __init__(self, chain: Chain, address: str) -> None:
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

    def appeal(self, key: str, work: str, statement: str) -> None:
        self._send("appeal(bytes32,string,bytes32)", _key(key), work, _key(statement))

    def decide(self, work: str, *, granted: bool) -> None:
        self._send("decide(string,bool)", work, granted)

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
        [found] = self._ask("slashes(string)", ["(bytes32,uint256,uint256,bool,bool)"], work)
        return bool(found[0] != NOBODY)

    def operator(self) -> str:
        """The account that may register, credit, slash and decide. Raises LedgerError if the contract is another one."""
        answer = self.chain.call(self.address, _call("operator()", []))
        if len(answer) != 32:
            raise LedgerError(
                f"no contract of Shoal at {self.address} on this chain: make one with `shoal stake deploy`"
            )
        return "0x" + answer[12:].hex()

    def pool(self) -> int:
        [found] = self._ask("pool()", ["uint256"])
        return int(found)

    def events(self, after: int = 0) -> Iterator[Event]:
        for data in self.chain.logs(self.address):
            seq, kind, key, work, amount, _ = _decode(ENTRY, data, "its events")
            if seq > after:
                yield Event(seq, kind, "" if key == NOBODY else key.hex(), work, amount)

    def _send(self, signature: str, *values: Any, value: int = 0) -> None:
        self.chain.transact(self.address, _call(signature, values), value)

    def _ask(self, signature: str, types: list[str], *values: Any) -> tuple[Any, ...]:
        return _decode(types, self.chain.call(self.address, _call(signature, values)), signature)


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

"""Opens a contract behind JSON-RPC, with the private key in a file.

Invariant: a key that others may read is not used. Called by the coordinator, `shoal stake` and the audit. Needs the extra
`evm`.
"""

import re
from pathlib import Path

from shoal.ledger.evm.contract import EvmStakes
from shoal.ledger.evm.web3_chain import Web3Chain
from shoal.ledger.interface import LedgerError

KEY = re.compile("[0-9a-fA-F]{64}")


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

"""The accounts of a pool on an EVM chain: a Vyper contract, its ABI and bytecode, and the backend (extra `evm`).

    stakes.vy      the contract        stakes.json   what the compiler made of it; a test compiles it again and compares
    contract       `EvmStakes`: the interface `Stakes`, over any `Chain`
    web3_chain     a chain behind JSON-RPC, through web3.py

Invariant: importing this room needs no extra; opening a chain does, and says so.
"""

"""`shoal pool stake ACTION`: stakes of workers, on a chain or booked by the operator.

    deposit, unstake, withdraw, account    for a worker's owner, on the pool's chain; takes the worker's --join and --dir
    book                                   for the operator of a pool without a chain
    deploy, settle                         for the operator of a pool with a chain

Invariant: a member pays only to the contract in the config that the coordinator signed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import PUBLIC_KEY, add_pool, say, whole
from shoal.errors import UserError

if TYPE_CHECKING:
    from shoal.ledger.evm import EvmStakes

AMOUNT = whole(1, (1 << 62) - 1)
BOOKINGS = ("stake", "unstake", "withdraw")


def add_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="stake_action", required=True, metavar="ACTION")

    deposit = actions.add_parser("deposit", help="stake on a worker, before or after it joins")
    _add_member(deposit).add_argument("amount", type=AMOUNT, help="in the chain's smallest unit (wei)")
    unstake = actions.add_parser("unstake", help="start to take back stake, which can still be slashed for 7 days")
    _add_member(unstake).add_argument("amount", type=AMOUNT)
    withdraw = "collect unstaked money, or the deposit of a worker that never joined"
    _add_member(actions.add_parser("withdraw", help=withdraw))
    _add_member(actions.add_parser("account", help="show a worker's stake and credit"))
    book = actions.add_parser(
        "book", help="operator without a chain: record that a worker stakes, unstakes or withdraws"
    )
    add_pool(book)
    book.add_argument("booking", choices=BOOKINGS)
    book.add_argument("key", help="the worker's key")
    book.add_argument("amount", type=AMOUNT, nargs="?", default=0)

    deploy = actions.add_parser("deploy", help="operator: deploy a new contract to a chain")
    _add_chain(deploy)
    what = "operator: copy a stopped run's missing ledger entries to its contract"
    settle = actions.add_parser("settle", help=what)
    settle.add_argument("run", type=Path, metavar="RUN", help="the folder of the run, or of its coordinator")


def _add_chain(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--rpc", required=True, metavar="URL", help="URL of a node of the chain")
    add = parser.add_argument
    add("--key-file", default="", metavar="FILE", help="file of a private key (default: the node's first account)")
    return parser


def _add_member(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--join", required=True, metavar="INVITE", help="the worker's invite, or a file that holds it")
    parser.add_argument(
        "--dir", type=Path, required=True, help="the worker's own folder; its key is created if missing"
    )
    return _add_chain(parser)


def stake(arguments: argparse.Namespace) -> None:
    actions = {"book": _book, "deploy": _deploy, "settle": _settle}
    actions.get(arguments.stake_action, _as_member)(arguments)


# --- members ---------------------------------------------------------------------------------------------------------


def _as_member(arguments: argparse.Namespace) -> None:
    from shoal.ledger.evm import open_contract
    from shoal.protocol.identity import Identity
    from shoal.protocol.invite import read_invite
    from shoal.protocol.node import KEY, Node, read_payer, write_payer

    identity = Identity.load_or_create(arguments.dir / KEY)
    section = Node.of(read_invite(arguments.join), identity, patience_s=10.0).config().ledger
    if not section.contract:
        raise UserError(f"this pool has no contract: ask its operator to book a stake for the key {identity.public}")
    stakes, key = open_contract(arguments.rpc, section.contract, arguments.key_file), identity.public
    account = stakes.account(key)
    match arguments.stake_action:
        case "deposit":
            payer = stakes.chain.address
            if (named := read_payer(arguments.dir) or payer).lower() != payer.lower():
                raise UserError(f"the account {named} already stakes on this worker: use its private key")
            write_payer(arguments.dir, payer)  # the worker reports it when it joins
            (stakes.stake if account else stakes.deposit)(key, arguments.amount)
        case "unstake":
            stakes.unstake(key, arguments.amount)
        case "withdraw":
            (stakes.withdraw if account and account.leaving else stakes.reclaim)(key)
    _show(stakes, key)


def _show(stakes: EvmStakes, key: str) -> None:
    account = stakes.account(key)
    if account is None:
        say(f"{key}: not registered; {stakes.deposited(key)} deposited")
        return
    say(f"{key}: {account.stake} staked, {account.leaving} leaving, {account.credit} tokens credited")
    for event in stakes.events():
        if event.kind == "slashed" and event.key == key:
            say(f"slashed: {event.amount} for {event.work}")


# --- operators -------------------------------------------------------------------------------------------------------


def _book(arguments: argparse.Namespace) -> None:
    from shoal.coordinator.folder import KEY, create_invite
    from shoal.protocol.identity import Identity
    from shoal.protocol.messages import Booking, Ok
    from shoal.protocol.node import Node

    if bool(arguments.amount) != (arguments.booking in ("stake", "unstake")):
        raise UserError(f"{arguments.booking} needs {'no' if arguments.amount else 'an'} AMOUNT")
    if not PUBLIC_KEY.fullmatch(arguments.key):
        raise UserError(
            f"{arguments.key[:80]!r} is not a worker's key, which has 64 lower-case hex digits "
            "(see `shoal audit RUN --export FILE`)"
        )
    booking = Booking(kind=arguments.booking, key=arguments.key, amount=arguments.amount)
    address = create_invite(arguments.dir, "worker", "operator", None, 1.0)  # only its URL and key are used
    Node.of(address, Identity.load(arguments.dir / KEY), patience_s=10.0).post("/v1/bookings", booking, Ok)
    say("booked")


def _deploy(arguments: argparse.Namespace) -> None:
    from shoal.ledger.evm import deploy, open_chain

    address = deploy(open_chain(arguments.rpc, arguments.key_file))
    key_file = f'key_file = "{arguments.key_file}"\n' if arguments.key_file else ""
    say(f'[ledger]\nrpc = "{arguments.rpc}"\ncontract = "{address}"\n{key_file}'.rstrip())


def _settle(arguments: argparse.Namespace) -> None:
    from shoal.cli.audit.run import open_run, settings_of
    from shoal.ledger.evm import open_contract, settle, unsettled

    run = arguments.run
    section = settings_of(run).ledger
    if not section.contract:
        raise UserError(f"the config in {run} names no contract: set [ledger]")
    contract = open_contract(section.rpc, section.contract, section.key_file, operates=True)
    entries = unsettled(open_run(run).chain, contract)
    say(f"{sum(settle(entry, contract) for entry in entries)} entries settled")

"""How the ranks of one training begin: torchrun's environment, and what the leader tells the others before they compute.

Invariant: config, dtype and whatever else the leader reads are the same on every rank. Called by `shoal pretrain` and
`shoal sft`; `shoal learner` has its config from the pool.
"""

import json
from collections.abc import Callable

from shoal.config import Config, parse
from shoal.errors import ShoalError
from shoal.learner.ranks import Ranks
from shoal.model import dtype
from shoal.model.dtype import DtypeName

RANKS_TIMEOUT_S = 1800.0  # that a rank waits for another in a collective: longer than any step or checkpoint takes


class LeaderError(ShoalError):
    """The leader ended; the message is its own."""


def start(config: Config) -> tuple[Ranks, Config, DtypeName]:
    """The ranks that torchrun started, the leader's config, and the dtype that it computes in. Raises DeviceError."""
    ranks = Ranks.start(RANKS_TIMEOUT_S, RANKS_TIMEOUT_S + config.sites.give_up_s)

    def tell() -> bytes:
        picked, _ = dtype.pick(config.model.dtype, config.model.device)
        return json.dumps([config.model_dump(exclude_none=True), picked]).encode()

    told, picked = json.loads(from_leader(ranks, tell))
    return ranks, config if ranks.leads else parse(told), picked


def from_leader(ranks: Ranks, read: Callable[[], bytes]) -> bytes:
    """What `read` returns on the leader, on every rank. If it raises a ShoalError there, the others raise LeaderError."""
    if not ranks.leads:
        told = ranks.broadcast(None)
        if told[:1] == b"!":
            raise LeaderError(f"rank 0 ended: {told[1:].decode()}")
        return told[1:]
    try:
        found = read()
    except ShoalError as error:
        ranks.broadcast(b"!" + str(error).encode())
        raise
    ranks.broadcast(b"=" + found)
    return found

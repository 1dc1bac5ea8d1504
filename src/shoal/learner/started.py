"""How the ranks of one training begin: torchrun's environment, and what the leader tells the others before they compute.

Invariant: config, dtype and whatever else the leader reads are the same on every rank. Called by `shoal pretrain` and
`shoal sft`; `shoal learner` has its config from the pool.
"""

import json
from collections.abc import Callable
from typing import TypeVar

from shoal.config import Config, parse
from shoal.errors import ShoalError
from shoal.learner.ranks import Ranks
from shoal.model import dtype
from shoal.model.dtype import DtypeName

Found = TypeVar("Found")
RANKS_TIMEOUT_S = 1800.0  # that a rank waits for another in a collective: longer than any step or checkpoint takes


class LeaderError(ShoalError):
    """The leader ended; the message is its own."""


def start(config: Config) -> tuple[Ranks, Config, DtypeName]:
    """The ranks that torchrun started, the leader's config, and the dtype that it computes in. Raises DeviceError."""
    ranks = Ranks.start(RANKS_TIMEOUT_S, RANKS_TIMEOUT_S + config.sites.give_up_s)

    def told(message: bytes) -> tuple[Config, DtypeName]:
        tables, picked = json.loads(message)
        return parse(tables), picked

    found, picked = from_leader(
        ranks,
        lambda: (config, dtype.pick(config.model.dtype, config.model.device)[0]),
        lambda found: json.dumps([found[0].model_dump(exclude_none=True), found[1]]).encode(),
        told,
    )
    return ranks, found, picked


def from_leader(
    ranks: Ranks, read: Callable[[], Found], encode: Callable[[Found], bytes], decode: Callable[[bytes], Found]
) -> Found:
    """What `read` returns on the leader, on every rank. If it raises a ShoalError there, the others raise LeaderError."""
    if not ranks.leads:
        told = ranks.broadcast(None)
        if told[:1] == b"!":
            raise LeaderError(f"rank 0 ended: {told[1:].decode()}")
        return decode(told[1:])
    try:
        found = read()
    except ShoalError as error:
        ranks.broadcast(b"!" + str(error).encode())
        raise
    if ranks.size > 1:
        ranks.broadcast(b"=" + encode(found))
    return found

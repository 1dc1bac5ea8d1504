"""What every role that computes does first: joins the pool, and learns the run's config and the dtype to compute in.

Called by the roles of this room.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import Config
from shoal.protocol.invite import Invite
from shoal.protocol.node import Node

if TYPE_CHECKING:
    from shoal.model.dtype import DtypeName


def join(invite: Invite, folder: Path, threads: int) -> tuple[Node, Config, DtypeName]:
    """Join the pool. Returns the node, the run's config, and the dtype to compute in on this machine."""
    from shoal.model import dtype
    from shoal.model.threads import compute_on

    compute_on(threads)
    node = Node.join(invite, folder)
    config = node.config()
    picked, _ = dtype.pick(config.model.dtype, config.model.device)
    return node, config, picked

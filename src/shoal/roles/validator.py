"""`shoal validator`: joins as a validator and judges submissions until the run ends."""

from __future__ import annotations

import threading
from pathlib import Path

from shoal.protocol.invite import Invite
from shoal.roles.exactness import fingerprinter
from shoal.roles.joining import join, task_set


def run_validator(invite: Invite, folder: Path, threads: int, stop: threading.Event) -> str:
    """Returns how the run ended."""
    from shoal.validator.service import Validator
    from shoal.validator.witness import Witness

    node, config, dtype = join(invite, folder, threads, stop)
    with node.heart():
        publisher = node.wait_for_key("origin", stop)
        tasks = task_set(node, config, folder)
        prints = fingerprinter(config, dtype)
        witness = Witness(node, folder)
        return Validator(node, config, folder / "weights", publisher, dtype, tasks, prints, witness).run(stop)

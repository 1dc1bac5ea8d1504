"""What an operator does to a member, beside the running coordinator: evict a relay, drain a worker, readmit a worker.

Invariant: it changes the member's state by the table in `states`, in the coordinator's database; the coordinator sees it at
the member's next heartbeat. Called by the commands of `cli/pool`.
"""

import time
from pathlib import Path

from shoal.coordinator.standing import states
from shoal.coordinator.standing.states import Event
from shoal.coordinator.state.database import PoolError
from shoal.coordinator.state.opening import open_tables
from shoal.coordinator.tables.connection import Connection
from shoal.coordinator.tables.evidence import EvidenceTable
from shoal.coordinator.tables.nodes import Node, Nodes
from shoal.errors import UserError
from shoal.protocol.messages import Role


class SteeringError(UserError):
    """No member of this name has the role."""


def evict_from(folder: Path, name: str) -> None:
    """Evicts a relay: nobody asks it from the next heartbeats on, and its key can read no weights.

    Raises SteeringError, PoolError, AddressError.
    """
    connection = open_tables(folder)
    _move(connection, _find(connection, name, "relay"), "ban", "evicted by the operator")


def drain_from(folder: Path, name: str) -> None:
    """No new tasks for a worker. It finishes the one that it holds, and leaves; nothing is held against it.

    Raises SteeringError, PoolError, AddressError.
    """
    connection = open_tables(folder)
    _move(connection, _find(connection, name, "worker"), "drain", "drained by the operator")


def readmit_from(folder: Path, name: str) -> None:
    """Tasks again for a worker that was dismissed, drains, has left, or was too slow; what was held against it is forgotten.

    A suspension stays, and who was slashed stays banned. Raises SteeringError, PoolError, AddressError.
    """
    connection = open_tables(folder)
    node = _find(connection, name, "worker")
    with connection.transaction():
        _move(connection, node, "readmit", "readmitted by the operator")
        EvidenceTable(connection).forget(node.key)


def _find(connection: Connection, name: str, role: Role) -> Node:
    every = [node for node in Nodes(connection).all() if node.role == role]
    found = next((node for node in every if node.name == name), None)
    if found is None:
        names = ", ".join(node.name for node in every if not node.evicted)
        raise SteeringError(f"{name} is not a {role} of this pool; its {role}s are: {names or 'none'}")
    return found


def _move(connection: Connection, node: Node, event: Event, reason: str) -> None:
    if not states.move(Nodes(connection), node.key, event, reason, time.time()):
        raise PoolError(f"{node.name} is {node.state} ({node.reason or 'no reason given'}): `{event}` changes nothing")

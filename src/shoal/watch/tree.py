"""The tree along which weights spread: each node below the one that sent it most. Called by `screen`.

Invariant: each server is in it once. Of the nodes that only receive, the first `takers` are in it.
"""

from collections.abc import Sequence

from shoal.protocol.messages import NodeStatus, Role

SERVERS: tuple[Role, ...] = ("origin", "relay")
DEEPEST = 4  # levels of indentation


def weights_tree(nodes: Sequence[NodeStatus], takers: int) -> tuple[list[tuple[int, NodeStatus]], int]:
    """(depth, node) from top to bottom, and how many receiving nodes are left out."""
    servers = [node for role in SERVERS for node in nodes if node.role == role]
    urls = {node.url: node for node in servers if node.url}

    def parent(node: NodeStatus) -> str | None:
        edges = {url: rate for url, rate in node.stats.intake.bytes_per_s.items() if url in urls}
        return urls[max(edges, key=lambda url: edges[url])].name if edges else None

    taking = [node for node in nodes if node.role not in SERVERS and parent(node)]
    left = [*servers, *taking[:takers]]
    rows: list[tuple[int, NodeStatus]] = []

    def hang(above: str | None, depth: int) -> None:
        for node in [node for node in left if parent(node) == above]:
            if node in left:  # two servers may have sent most to each other
                left.remove(node)
                rows.append((depth, node))
                hang(node.name, min(depth + 1, DEEPEST))

    hang(None, 0)
    return [*rows, *((0, node) for node in left)], len(taking[takers:])

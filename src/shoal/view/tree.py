"""The tree that weights came down: each node under the one that sent it most. Called by `screen`.

Invariant: each server is in it once, and each node that tells of a server that sent it something, up to `takers`.
"""

from collections.abc import Sequence

from shoal.protocol.messages import NodeStatus, Role

SERVERS: tuple[Role, ...] = ("origin", "relay")
DEEPEST = 4  # steps of indentation


def weights_tree(nodes: Sequence[NodeStatus], takers: int) -> tuple[list[tuple[int, NodeStatus]], int]:
    """Depth and node: servers, and below them those who only take, the first `takers` of them; and how many are left out."""
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
            if node in left:  # two servers may have sent each other most
                left.remove(node)
                rows.append((depth, node))
                hang(node.name, min(depth + 1, DEEPEST))

    hang(None, 0)
    return [*rows, *((0, node) for node in left)], len(taking[takers:])

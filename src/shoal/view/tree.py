"""The tree that weights came down: each node under the one that sent it most. Called by `screen`."""

from collections.abc import Sequence

from shoal.messages import NodeStatus, Role

SERVERS: tuple[Role, ...] = ("origin", "relay")
TAKERS, DEEPEST = 4, 4  # nodes shown that only take; steps of indentation


def weights_tree(nodes: Sequence[NodeStatus]) -> list[tuple[int, NodeStatus]]:
    """Depth and node: servers, and below them the first few of those who only take."""
    servers = [node for role in SERVERS for node in nodes if node.role == role]
    urls = {node.url: node for node in servers if node.url}

    def parent(node: NodeStatus) -> str | None:
        edges = {url: rate for url, rate in node.stats.intake.bytes_per_s.items() if url in urls}
        return urls[max(edges, key=lambda url: edges[url])].name if edges else None

    takers = [node for node in nodes if node.role not in SERVERS and parent(node)][:TAKERS]
    left = [*servers, *takers]
    rows: list[tuple[int, NodeStatus]] = []

    def hang(above: str | None, depth: int) -> None:
        for node in [node for node in left if parent(node) == above]:
            if node in left:  # two servers may have sent each other most
                left.remove(node)
                rows.append((depth, node))
                hang(node.name, min(depth + 1, DEEPEST))

    hang(None, 0)
    return [*rows, *((0, node) for node in left)]

"""The tables of the screen: the tree along which weights spread, and the nodes.

Invariant: a table is never wider than the width it is made for, whatever a node reports, and no word of it is broken by a
line. Called by `screen`.
"""

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from shoal.protocol.messages import NodeStatus, Status
from shoal.watch.figures import NONE, SILENT_S, clamp, clean, count, duration, memory, middle, number, words_in
from shoal.watch.pace import Pace
from shoal.watch.tree import SERVERS, weights_tree

WIDE = 110  # from this width on, headings are whole words
NARROW = 90  # below this width, what a node does takes the room of its role and memory
EDGES = 3  # senders named in a line of the tree of weights


def weights_table(status: Status, width: int, takers: int) -> tuple[RenderableType, int]:
    """The tree along which weights spread: each node below the one that sent it most, with the rate of each sender; and
    how many rows it lacks."""
    servers = [node for role in SERVERS for node in status.nodes if node.role == role]
    if not servers:
        return Text("no origin or relay yet", style="dim"), 0
    names = {node.url: node.name for node in servers if node.url}
    table = _table(width)
    _column(table, "name")
    _column(table, "has", right=True)
    _column(table, "came from", rest=True)
    _column(table, "behind", right=True)
    _column(table, "seen", right=True)
    rows, hidden = weights_tree(status.nodes, takers)
    for depth, node in rows:
        edges = node.stats.intake.bytes_per_s
        fast_first = sorted(edges.items(), key=lambda edge: -edge[1])
        senders = ", ".join(f"{names.get(url, NONE)} {count(rate)}B/s" for url, rate in fast_first[:EDGES])
        behind_s = node.stats.intake.behind_s
        table.add_row(
            Text("  " * depth).append(_name(node, width)),
            _version(node),
            Words(clean(senders)) if senders else _doing(node, status),
            Text(NONE if behind_s is None else f"{number(behind_s, 1)} s"),
            _seen(node, status),
        )
    return table, hidden


def nodes_table(nodes: list[NodeStatus], status: Status, pace: Pace, width: int) -> RenderableType:
    wide, narrow = width >= WIDE, width < NARROW
    table = _table(width)
    _column(table, "name")
    if not narrow:
        _column(table, "role")
    _column(table, "loaded" if wide else "has", right=True)
    _column(table, "doing", rest=True)
    _column(table, "tokens/s" if wide else "tok/s", right=True)
    _column(table, "accepted" if wide else "acc", right=True)
    _column(table, "rejected" if wide else "rej", right=True)
    if not narrow:
        _column(table, "memory" if wide else "mem", right=True)
    _column(table, "seen", right=True)
    for node in nodes:
        worker = node.role == "worker"
        table.add_row(
            _name(node, width),
            *([] if narrow else [node.role]),
            _version(node),
            _doing(node, status),
            Text(NONE if node.evicted else count(pace.tokens_per_s(node))),
            Text(str(node.accepted) if worker else ""),
            Text(str(node.rejected) if worker else "", style="red" if node.rejected else ""),
            *([] if narrow else [Text(memory(node.stats.rss_bytes, short=not wide))]),
            _seen(node, status),
        )
    return table


@dataclass(frozen=True)
class Words:
    """One line of text that takes the room it is given, and ends with a whole word."""

    text: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(words_in(self.text, options.max_width), style=self.style, no_wrap=True, overflow="ellipsis")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, min(max(len(self.text), 1), options.max_width))


def worth_showing(nodes: list[NodeStatus], status: Status, room: int) -> list[NodeStatus]:
    """At most `room` nodes, in their order. Nodes with a problem come before workers without one."""

    def calm(node: NodeStatus) -> bool:
        late = status.now_s - node.seen_s > SILENT_S
        return node.role == "worker" and not (node.evicted or node.suspended_s or node.rejected or late)

    kept = {id(node) for node in sorted(nodes, key=calm)[:room]}
    return [node for node in nodes if id(node) in kept]


def _table(width: int) -> Table:
    gap = 2 if width >= 90 else 1
    return Table(box=None, expand=True, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")


def _column(table: Table, title: str, right: bool = False, rest: bool = False) -> None:
    """A column as wide as its content. `rest`: it takes the width that the others leave."""
    table.add_column(title, ratio=1 if rest else None, no_wrap=True, justify="right" if right else "left")


def _name(node: NodeStatus, width: int) -> Text:
    most = min(max(width // 6, 8), 20)
    return Text(middle(clean(node.name), most), style="strike" if node.evicted else "")


def _version(node: NodeStatus) -> Text:
    return Text(NONE if node.policy_version is None else f"v{clamp(node.policy_version)}")


def _doing(node: NodeStatus, status: Status) -> Words:
    if node.name in status.slashed:
        return Words("slashed", style="bold red")
    if node.suspended_s:
        return Words(f"suspended for {duration(node.suspended_s)}: {clean(node.suspension)}", style="yellow")
    if node.state in ("draining", "left", "unfit", "dismissed"):
        return Words(f"{node.state}: {clean(node.reason)}", style="yellow")
    doing = clean(node.stats.doing)
    return Words(f"waiting for {doing}" if node.stats.waiting and doing else doing or NONE)


def _seen(node: NodeStatus, status: Status) -> Text:
    if node.evicted:
        return Text("evicted", style="bold red")
    age_s = status.now_s - node.seen_s
    if age_s < 2:
        return Text("now")
    return Text(duration(age_s), style="yellow" if age_s > SILENT_S else "")

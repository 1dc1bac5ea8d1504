"""One screen shows the whole run: progress, training, nodes, verdicts.

Invariant: whatever a node reports, no line is wider than the console. A terminal of 80x24 or more shows progress,
training and verdicts. Nodes with a problem have priority; a line counts the nodes that do not fit. The table of sites
needs a taller terminal.
The screen does not scroll. Only the dashboard shows the weights tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.protocol.history import NodeStatus, RunHistory, Status
from shoal.protocol.messages import Evaluation, Role
from shoal.watch.figures import (
    NONE,
    SILENT_S,
    SiteRow,
    activity,
    and_more,
    busy_frac,
    clamp,
    clean,
    count,
    duration,
    ellipsize,
    eta_s,
    format_counts,
    format_exactness,
    format_rejections,
    grader_warning,
    means_by_name,
    memory,
    no_signal_warning,
    node_condition,
    number,
    percent,
    ratio,
    site_rows,
    sites_summary,
    sparkline,
    tokens_per_s,
    total,
    useful_share,
    verdict_totals,
)

MAX_WIDTH = 120  # a wider screen would only have wider gaps between columns
FRAME = 3  # lines that a panel adds to its table's rows: two borders and the headings
WIDE = 110  # from this width on, headings are not abbreviated
NARROW = 90  # below this width, role and memory are dropped
MIN_NODES = 6  # show the table of sites only if this many nodes still fit
ORDER: tuple[Role, ...] = ("learner", "worker", "validator", "evaluator", "origin", "relay")


@dataclass(frozen=True)
class Screen:
    """The screen, laid out for the console's size. `elapsed_s`: time so far, or None for time since the start."""

    status: Status
    history: RunHistory
    elapsed_s: float | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status, history = self.status, self.history
        width = min(MAX_WIDTH, options.max_width)
        room = options.max_height if console.is_terminal else 10_000

        def lines(part: RenderableType) -> int:
            return len(console.render_lines(part, options.update(width=width, height=None), pad=False))

        elapsed_s = status.now_s - status.started_s if self.elapsed_s is None else self.elapsed_s
        header = _header(status, history, elapsed_s, width)
        training = _panel("training", _training(status, history, elapsed_s, width))
        verdicts = Padding(_verdicts(status, width - 4), (0, 2))
        room -= sum(map(lines, (header, training, verdicts)))
        sites = site_rows(history.metrics)
        table = [_panel("sites", sites_table(sites, width))] if sites else []
        table = table if room - sum(map(lines, table)) >= FRAME + MIN_NODES else []
        nodes = _nodes_panel(status, width, room - sum(map(lines, table)))
        yield from console.render(Group(header, training, *table, nodes, verdicts), options.update(width=width))


def _panel(title: str, content: RenderableType, hint: str = "") -> Panel:
    return Panel(
        content,
        title=title,
        title_align="left",
        subtitle=hint or None,
        subtitle_align="right",
        border_style="dim",
        padding=(0, 1),
    )


def _header(status: Status, history: RunHistory, elapsed_s: float, width: int) -> RenderableType:
    running, done = status.state == "running", len(history.metrics)
    items = [
        Text(ellipsize(clean(status.run), max(width // 2, 12)) or NONE, style="bold"),
        Text(status.state, style="green"),
        Text(f"{done} of {status.steps} steps"),
        Text(f"elapsed {duration(elapsed_s)}"),
    ]
    if running:
        items.append(Text(f"ETA {duration(eta_s(status, history.metrics))}"))
    line = _flow(items, width - 4)
    bar = ProgressBar(total=max(status.steps, 1), completed=done, complete_style="cyan", finished_style="green")
    return Padding(Group(line, bar), (0, 2))


def _training(status: Status, history: RunHistory, elapsed_s: float, width: int) -> RenderableType:
    cells = width - 17  # width left beside frame and labels
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="ellipsis")
    rows.add_row("reward", _reward(history, cells - 32))
    last = history.metrics[-1] if history.metrics else {}
    if len(sources := means_by_name(last, "reward")) > 1:
        rows.add_row("sources", _one_line([_source(name, mean, last) for name, mean in sources.items()], cells))
    if lengths := means_by_name(last, "length"):
        lost = number(last.get("length_penalty/mean"))
        each = [f"{clean(target)} → {number(mean, 0)}" for target, mean in lengths.items()]
        rows.add_row("length", _one_line([f"penalty {lost}", *each], cells))
    rows.add_row("held-out", _heldout(history.evaluations, cells))
    rows.add_row("tokens/s", _tokens(status, history, elapsed_s, cells))
    rows.add_row("rollout age", _age(status, history, cells))
    rows.add_row("learner", _learner(history, cells))
    rows.add_row("next batch", _batch(status))
    if sites := site_rows(history.metrics):
        style = "" if all(site.healthy for site in sites) else "yellow"
        rows.add_row("sites", _one_line(sites_summary(sites), cells, style))
    for label, warning in (("no signal", no_signal_warning(status.signal)), ("grader", grader_warning(status.grading))):
        if warning:
            rows.add_row(label, Text(warning, style="yellow"))
    return rows


def _source(name: str, reward: float, step: dict[str, float]) -> str:
    """Format a source's mean reward, and the number of its groups that the online filter dropped."""
    filtered = step.get(f"filtered/{name}", 0.0)
    return f"{clean(name)} {number(reward)}" + (f" ({number(filtered, 0)} left out)" if filtered else "")


def _one_line(items: Sequence[str], cells: int, style: str = "") -> Text:
    """Join as many items as fit in one line, and count the others."""
    kept = list(items)
    while True:
        hidden = len(items) - len(kept)
        text = Text("   ".join([*kept, *([and_more(hidden)] if hidden else [])]), style=style)
        if text.cell_len <= cells or not kept:
            return text
        kept.pop()


def _reward(history: RunHistory, spark_cells: int) -> Text:
    rewards = [step["reward/mean"] for step in history.metrics if "reward/mean" in step]
    if not rewards:
        return Text("no step trained yet", style="dim")
    text = Text().append(number(rewards[-1]), style="bold")
    if len(rewards) > 1:
        change = rewards[-1] - rewards[0]
        text.append(f"  {sparkline(rewards, spark_cells)}  ", style="cyan")
        text.append(f"{change:+.3f}", style="green" if change > 0 else "yellow").append(" since step 1")
    return text


def _heldout(evaluations: Sequence[Evaluation], cells: int) -> Text:
    if not evaluations:
        return Text("not evaluated yet", style="dim")
    first, last = evaluations[0], evaluations[-1]
    greedy, sampled, version = percent(last.greedy), percent(last.sampled), f"v{last.version}"
    if len(evaluations) > 1:
        greedy = f"{percent(first.greedy)} → {greedy}"
        sampled = f"{percent(first.sampled)} → {sampled}"
        version = f"v{first.version} → {version}"
    return _flow([Text(f"greedy {greedy}"), Text(f"sampled {sampled}"), Text(f"{version}, n {last.n}")], cells)


def _tokens(status: Status, history: RunHistory, elapsed_s: float, cells: int) -> Text:
    generated, trained = status.tokens_generated, total(history.metrics, "perf/tokens")
    items = [
        Text(f"{count(ratio(generated, elapsed_s))} generated ({count(generated)} in all)"),
        Text(f"{count(ratio(trained, elapsed_s))} trained ({count(trained)} in all)"),
    ]
    return _flow(items, cells)


def _age(status: Status, history: RunHistory, cells: int) -> Text:
    last = history.metrics[-1] if history.metrics else {}
    mean, oldest = last.get("async/staleness_mean"), last.get("async/staleness_max")
    items = [Text(f"mean {number(mean, 1)}, max {number(oldest, 0)} versions" if history.metrics else NONE)]
    if status.stale_groups:
        items.append(Text(f"{status.stale_groups} groups grew too old", style="yellow"))
    return _flow(items, cells)


def _learner(history: RunHistory, cells: int) -> Text:
    if not history.metrics:
        return Text(NONE)
    busy, last = busy_frac(history.metrics), history.metrics[-1]
    has_kl = any(step.get("policy/kl") for step in history.metrics)  # always 0 if learner.loss.beta is 0
    items = [
        Text(f"busy {percent(busy, 0)}, waiting {percent(None if busy is None else 1 - busy, 0)}"),
        Text(f"entropy {number(last.get('policy/entropy'))}"),
        *([Text(f"KL {number(last['policy/kl'], 4)}")] if has_kl and "policy/kl" in last else []),
        Text(f"grad norm {number(last.get('optim/grad_norm'))}"),
    ]
    return _flow(items, cells)


def _batch(status: Status) -> Text:
    if status.state == "finished" or status.step >= status.steps:
        return Text("none: every step has its rollouts")
    text = Text(f"{status.have} of {status.need} groups accepted for step {status.step + 1}")
    return text.append(f", {share}" if (share := useful_share(status.signal)) else "")


def _nodes_panel(status: Status, width: int, room: int) -> RenderableType:
    """Draw the nodes in at most `room` lines: a table, or one line that counts them."""
    nodes = sorted(status.nodes, key=lambda node: ORDER.index(node.role))
    if not nodes:
        return _panel("nodes", Text("no node yet", style="dim"))
    title = f"nodes ({len(nodes)})"
    if room <= FRAME + 1:
        return Padding(Text(f"{title}  {and_more(len(nodes))}", style="dim"), (0, 2))
    shown = worth_showing(nodes, status, room - FRAME)
    return _panel(title, nodes_table(shown, status, width), and_more(len(nodes) - len(shown)))


def _verdicts(status: Status, cells: int) -> Text:
    accepted, rejected = verdict_totals(status)
    slashed = ", ".join(clean(name) for name in status.slashed)
    missed = {clean(node.name): node.missed for node in status.nodes if node.missed}
    items = [
        Text(f"verdicts  {accepted} accepted, {format_rejections(rejected, status.reject_reasons)}"),
        *([Text(format_exactness(status.exact))] if status.exact.submissions else []),
        Text("slashed  ").append(slashed or "none", style="bold red" if slashed else ""),
        *([Text(f"missed tasks  {sum(missed.values())} ({format_counts(missed, 'of ')})")] if missed else []),
    ]
    return _flow(items, cells)


def _flow(items: Sequence[Text], cells: int) -> Text:
    """Join items. An item that does not fit in the line starts a new line."""
    text, used = Text(overflow="ellipsis"), 0
    for item in items:
        fits = used + 3 + item.cell_len <= cells
        text.append("   " if used and fits else "\n" if used else "").append(item)
        used = used + 3 + item.cell_len if used and fits else item.cell_len
    return text


# --- tables ------------------------------------------------------------------------------------------------------------


def sites_table(sites: Sequence[SiteRow], width: int) -> Table:
    table = _table(width)
    _column(table, "site")
    _column(table, "state", rest=True)
    for title in ("loss", "computing", "waiting", "syncing", "sent", "received"):
        _column(table, title, right=True)
    for site in sites:
        times = (percent(site.share(each), 0) for each in (site.computed_s, site.waited_s, site.synced_s))
        sizes = (f"{count(each)}B" if each else NONE for each in (site.sent_bytes, site.received_bytes))
        state = Text(site.state, style="" if site.healthy else "yellow")
        table.add_row(Text(site.name), state, number(site.loss), *times, *sizes)
    return table


def nodes_table(nodes: list[NodeStatus], status: Status, width: int) -> Table:
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
            Text(NONE if node.evicted else count(tokens_per_s(node))),
            Text(str(node.accepted) if worker else ""),
            Text(str(node.rejected) if worker else "", style="red" if node.rejected else ""),
            *([] if narrow else [Text(memory(node.stats.rss_bytes, short=not wide))]),
            _seen(node, status),
        )
    return table


def worth_showing(nodes: list[NodeStatus], status: Status, room: int) -> list[NodeStatus]:
    """Choose at most `room` nodes, keeping their order. Drop workers and relays without a problem first."""

    def may_drop(node: NodeStatus) -> bool:
        _, tone = node_condition(node, status, running=status.state == "running")
        return node.role in ("worker", "relay") and tone in ("good", "none") and not node.rejected

    kept = {id(node) for node in sorted(nodes, key=may_drop)[:room]}
    return [node for node in nodes if id(node) in kept]


def _table(width: int) -> Table:
    gap = 2 if width >= 90 else 1
    return Table(box=None, expand=True, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")


def _column(table: Table, title: str, right: bool = False, rest: bool = False) -> None:
    """Add a column as wide as its content, or with `rest` as wide as the remaining space."""
    table.add_column(title, ratio=1 if rest else None, no_wrap=True, justify="right" if right else "left")


def _name(node: NodeStatus, width: int) -> Text:
    max_cells = min(max(width // 6, 8), 20)
    return Text(ellipsize(clean(node.name), max_cells), style="strike" if node.evicted else "")


def _version(node: NodeStatus) -> Text:
    return Text(NONE if node.policy_version is None else f"v{clamp(node.policy_version)}")


def _doing(node: NodeStatus, status: Status) -> Text:
    if node.name in status.slashed:
        return Text("slashed", style="bold red")
    if node.suspended_s:
        return Text(f"suspended for {duration(node.suspended_s)}: {clean(node.suspension)}", style="yellow")
    if node.state in ("draining", "left", "dismissed"):
        return Text(f"{node.state}: {clean(node.reason)}", style="yellow")
    return Text(clean(activity(node)) or NONE)


def _seen(node: NodeStatus, status: Status) -> Text:
    if node.evicted:
        return Text("evicted", style="bold red")
    age_s = status.now_s - node.seen_s
    if age_s < 2:
        return Text("now")
    return Text(duration(age_s), style="yellow" if age_s > SILENT_S else "")

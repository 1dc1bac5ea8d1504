"""What a person sees of a run while it goes on: one screen in a terminal, one line per event anywhere else.

Invariant: a `Status` goes in, text comes out, and nothing that a node says of itself can break it: that is
stripped of control characters, cut to its column, and clamped before it is divided.
`shoal run` and `shoal status` call this with each Status they fetched.

Left out: asking for the Status (the caller does), a log of the past (that is the ledger), and scrolling:
nodes that do not fit are counted, those that something is wrong with are shown first.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.messages import Evaluation, NodeStatus, Role, Status

MAX_WIDTH = 120  # wider terminals only pull the columns apart
WIDE = 110  # from here on headings are whole words
SILENT_S = 30.0  # a node not seen for so long is marked; what that means for its work is the coordinator's
ETA_STEPS = 10  # the pace of so many last steps is taken for that of the rest
BLOCKS = "▁▂▃▄▅▆▇█"
NONE = "–"
SERVERS: tuple[Role, ...] = ("origin", "relay")
NODES: tuple[Role, ...] = ("learner", "worker", "validator", "evaluator")


def render(status: Status, pace: "Pace | None" = None, *, width: int | None = None) -> RenderableType:
    """The whole screen, `width` columns wide (the console's, if that is less or none is given)."""
    return Screen(status, pace or Pace(), width)


class LiveView:
    """The view of one run: `update` redraws the screen in a terminal, and prints what is new elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._pace = Pace()
        self._events = Events()
        # No refresh thread: nothing changes between two statuses.
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, status: Status) -> None:
        self._pace.add(status)
        if self._live is not None:
            self._live.update(render(status, self._pace), refresh=True)
        else:
            for line in self._events.new(status):
                self.log(line)

    def log(self, message: str) -> None:
        """Print a line, above the screen if there is one."""
        line = Text("\n").join(Text(clean(part)) for part in message.splitlines())
        self.console.print(line, soft_wrap=self._live is None)


# --- what is remembered between two statuses ----------------------------------------------------------------


class Pace:
    """Tokens per second of every node over the last `window_s`, from successive statuses."""

    def __init__(self, window_s: float = 60.0) -> None:
        self._window_s = window_s
        self._samples: dict[str, deque[tuple[float, int]]] = {}  # name: (now_s, tokens)

    def add(self, status: Status) -> None:
        for node in status.nodes:
            samples = self._samples.setdefault(node.name, deque())
            tokens = clamp(node.stats.tokens)
            if samples and tokens < samples[-1][1]:
                samples.clear()  # it restarted and counts from 0
            samples.append((status.now_s, tokens))
            while len(samples) > 2 and status.now_s - samples[1][0] >= self._window_s:
                samples.popleft()

    def tokens_per_s(self, node: NodeStatus) -> float | None:
        """None where nothing is known; until a tenth of the window is seen, the mean since its start."""
        samples = self._samples.get(node.name, deque())
        if len(samples) > 1 and samples[-1][0] - samples[0][0] >= self._window_s / 10:
            return (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])
        return ratio(clamp(node.stats.tokens), node.stats.busy_s + node.stats.waiting_s)


class Events:
    """Turns successive statuses into lines of plain text, each event once."""

    def __init__(self) -> None:
        self._steps = 0
        self._evaluated: set[tuple[int, bool]] = set()
        self._rejected: dict[str, int] = {}
        self._reasons: dict[str, int] = {}
        self._slashed: set[str] = set()
        self._nodes: dict[str, tuple[int, str]] = {}  # name: (pid, here | silent | evicted)

    def new(self, status: Status) -> list[str]:
        """The lines for what happened since the last call."""
        return [
            *self._membership(status),
            *self._training(status),
            *self._evaluations(status),
            *self._rejections(status),
            *self._slashes(status),
        ]

    def _membership(self, status: Status) -> Iterator[str]:
        for node in status.nodes:
            age_s = status.now_s - node.seen_s
            silent = age_s > SILENT_S and status.state == "running"
            now = "evicted" if node.evicted else "silent" if silent else "here"
            pid, before = self._nodes.get(node.name, (0, ""))
            self._nodes[node.name] = (node.stats.pid or pid, now)
            who = f"{node.name} ({node.role})"
            if not before:
                yield f"joined: {who}"
            elif pid and node.stats.pid not in (0, pid):
                yield f"restarted: {who}"
            elif now == "here" != before:
                yield f"rejoined: {who}"
            if now != before and now == "evicted":
                yield f"evicted: {who}"
            elif now != before and now == "silent":
                yield f"silent: {who}, last seen {duration(age_s)} ago"

    def _training(self, status: Status) -> Iterator[str]:
        first = first_of(status.metrics, "reward/mean")
        for index in range(self._steps, len(status.metrics)):
            step = status.metrics[index]
            reward = step.get("reward/mean")
            since = ""
            if index and reward is not None and first is not None:
                since = f" ({reward - first:+.3f} since step 1)"
            yield (
                f"step {index + 1} of {status.steps}: reward {number(reward)}{since}, "
                f"{count(step.get('perf/tokens'))} tokens, "
                f"rollout age mean {number(step.get('async/staleness_mean'), 1)} "
                f"max {number(step.get('async/staleness_max'), 0)}, "
                f"entropy {number(step.get('policy/entropy'))}, busy {number(step.get('perf/busy_s'), 1)} s, "
                f"waiting {number(step.get('perf/waiting_s'), 1)} s"
            )
        self._steps = max(self._steps, len(status.metrics))

    def _evaluations(self, status: Status) -> Iterator[str]:
        for found in status.evaluations:
            if (found.version, found.final) in self._evaluated:
                continue
            self._evaluated.add((found.version, found.final))
            yield (
                f"held-out at v{found.version}{' (final)' if found.final else ''}: "
                f"greedy {percent(found.greedy)}, sampled {percent(found.sampled)}, n {found.n}"
            )

    def _rejections(self, status: Status) -> Iterator[str]:
        rejected = {node.name: node.rejected for node in status.nodes if node.role == "worker"}
        who, why = _risen(self._rejected, rejected), _risen(self._reasons, status.reject_reasons)
        self._rejected |= rejected
        self._reasons |= status.reject_reasons
        if who or why:
            yield f"rejected: {_counts(who) or NONE}; reason: {_counts(why) or NONE}"

    def _slashes(self, status: Status) -> Iterator[str]:
        for name in status.slashed:
            if name not in self._slashed:
                self._slashed.add(name)
                yield f"slashed: {name}"


# --- the screen ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Screen:
    """The layout, made for the width and height it is drawn at."""

    status: Status
    pace: Pace
    width: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width or MAX_WIDTH, options.max_width)
        height = options.max_height if console.is_terminal else 10_000
        parts = [
            _header(self.status, width),
            _panel("training", _training(self.status, width)),
            _panel("weights", _servers(self.status, width)),
            _panel("nodes", _nodes(self.status, self.pace, width, height - 23)),
            Padding(_verdicts(self.status, width - 4), (0, 2)),
        ]
        yield from console.render(Group(*parts), options.update(width=width))


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="dim", padding=(0, 1))


def _header(status: Status, width: int) -> RenderableType:
    running, done = status.state == "running", len(status.metrics)
    items = [
        Text(clean(status.run) or NONE, style="bold"),
        Text(status.state, style="green"),
        Text(f"step {done} of {status.steps}"),
        Text(f"elapsed {duration(status.now_s - status.started_s)}"),
    ]
    if running:
        items.append(Text(f"ETA {duration(eta_s(status))}"))
    line = _flow(items, width - 4)
    bar = ProgressBar(
        total=max(status.steps, 1), completed=done, complete_style="cyan", finished_style="green"
    )
    return Padding(Group(line, bar), (0, 2))


def _training(status: Status, width: int) -> RenderableType:
    cells = width - 17  # what the frame and the labels leave
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_row("reward", _reward(status, cells - 32))
    rows.add_row("held-out", _heldout(status.evaluations, cells))
    rows.add_row("tokens/s", _tokens(status, cells))
    rows.add_row("rollout age", _age(status, cells))
    rows.add_row("learner", _learner(status, cells))
    rows.add_row("next batch", _batch(status))
    return rows


def _reward(status: Status, spark_cells: int) -> Text:
    rewards = [step["reward/mean"] for step in status.metrics if "reward/mean" in step]
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
    return _flow(
        [Text(f"greedy {greedy}"), Text(f"sampled {sampled}"), Text(f"{version}, n {last.n}")], cells
    )


def _tokens(status: Status, cells: int) -> Text:
    elapsed_s = status.now_s - status.started_s
    made, trained = status.tokens_generated, total(status.metrics, "perf/tokens")
    items = [
        Text(f"{count(ratio(made, elapsed_s))} generated ({count(made)} in all)"),
        Text(f"{count(ratio(trained, elapsed_s))} trained ({count(trained)} in all)"),
    ]
    return _flow(items, cells)


def _age(status: Status, cells: int) -> Text:
    last = status.metrics[-1] if status.metrics else {}
    mean, most = last.get("async/staleness_mean"), last.get("async/staleness_max")
    items = [Text(f"mean {number(mean, 1)}, max {number(most, 0)} versions" if status.metrics else NONE)]
    if status.stale_groups:
        items.append(Text(f"{status.stale_groups} groups grew too old", style="yellow"))
    return _flow(items, cells)


def _learner(status: Status, cells: int) -> Text:
    if not status.metrics:
        return Text(NONE)
    busy, last = busy_frac(status), status.metrics[-1]
    items = [
        Text(f"busy {percent(busy, 0)}, waiting {percent(None if busy is None else 1 - busy, 0)}"),
        Text(f"entropy {number(last.get('policy/entropy'))}"),
        Text(f"KL {number(last.get('policy/kl'), 4)}"),
        Text(f"grad norm {number(last.get('optim/grad_norm'))}"),
    ]
    return _flow(items, cells)


def _batch(status: Status) -> Text:
    if status.state == "finished" or status.step >= status.steps:
        return Text("none: every step has its rollouts")
    return Text(f"{status.have} of {status.need} groups accepted for step {status.step + 1}")


def _servers(status: Status, width: int) -> RenderableType:
    servers = [node for role in SERVERS for node in status.nodes if node.role == role]
    if not servers:
        return Text("no origin or relay yet", style="dim")
    table = _table(width)
    _column(table, "name")
    _column(table, "serves", right=True)
    _column(table, "doing", rest=True)
    _column(table, "seen", right=True)
    for node in servers:
        table.add_row(_name(node, width), _version(node), _doing(node, status), _seen(node, status))
    return table


def _nodes(status: Status, pace: Pace, width: int, room: int) -> RenderableType:
    nodes = [node for role in NODES for node in status.nodes if node.role == role]
    if not nodes:
        return Text("no learner, worker, validator or evaluator yet", style="dim")
    wide = width >= WIDE
    table = _table(width)
    _column(table, "name")
    _column(table, "role")
    _column(table, "loaded" if wide else "has", right=True)
    _column(table, "doing", rest=True)
    _column(table, "tokens/s" if wide else "tok/s", right=True)
    _column(table, "accepted" if wide else "acc", right=True)
    _column(table, "rejected" if wide else "rej", right=True)
    _column(table, "memory" if wide else "mem", right=True)
    _column(table, "seen", right=True)
    shown = _worth_showing(nodes, status, max(room, 6))
    for node in shown:
        worker = node.role == "worker"
        table.add_row(
            _name(node, width),
            node.role,
            _version(node),
            _doing(node, status),
            Text(NONE if node.evicted else count(pace.tokens_per_s(node))),
            Text(str(node.accepted) if worker else ""),
            Text(str(node.rejected) if worker else "", style="red" if node.rejected else ""),
            Text(memory(node.stats.rss_bytes, short=not wide)),
            _seen(node, status),
        )
    hidden = len(nodes) - len(shown)
    return Group(table, Text(f"and {hidden} more", style="dim")) if hidden else table


def _worth_showing(nodes: list[NodeStatus], status: Status, room: int) -> list[NodeStatus]:
    """At most `room` nodes, in their order: rather those that something is wrong with than calm workers."""

    def calm(node: NodeStatus) -> bool:
        late = status.now_s - node.seen_s > SILENT_S
        return node.role == "worker" and not (node.evicted or node.rejected or late)

    kept = {id(node) for node in sorted(nodes, key=calm)[:room]}
    return [node for node in nodes if id(node) in kept]


def _verdicts(status: Status, cells: int) -> Text:
    workers = [node for node in status.nodes if node.role == "worker"]
    accepted, rejected = sum(node.accepted for node in workers), sum(node.rejected for node in workers)
    reasons, slashed = _counts(status.reject_reasons), ", ".join(clean(name) for name in status.slashed)
    items = [
        Text(f"verdicts  {accepted} accepted, {rejected} rejected" + (f" ({reasons})" if reasons else "")),
        Text("slashed  ").append(slashed or "none", style="bold red" if slashed else ""),
    ]
    return _flow(items, cells)


def _flow(items: Sequence[Text], cells: int) -> Text:
    """The items side by side; one that does not fit begins a line."""
    text, used = Text(), 0
    for item in items:
        fits = used + 3 + item.cell_len <= cells
        text.append("   " if used and fits else "\n" if used else "").append(item)
        used = used + 3 + item.cell_len if used and fits else item.cell_len
    return text


def _table(width: int) -> Table:
    gap = 2 if width >= 90 else 1
    return Table(box=None, expand=True, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")


def _column(table: Table, title: str, right: bool = False, rest: bool = False) -> None:
    """A column as wide as what is in it; `rest`: what the others leave."""
    table.add_column(title, ratio=1 if rest else None, no_wrap=True, justify="right" if right else "left")


def _name(node: NodeStatus, width: int) -> Text:
    name = Text(clean(node.name), style="strike" if node.evicted else "")
    name.truncate(min(max(width // 6, 8), 20), overflow="ellipsis")
    return name


def _version(node: NodeStatus) -> Text:
    return Text(NONE if node.policy_version is None else f"v{clamp(node.policy_version)}")


def _doing(node: NodeStatus, status: Status) -> Text:
    if node.name in status.slashed:
        return Text("slashed", style="bold red")
    return Text(clean(node.stats.doing) or NONE)


def _seen(node: NodeStatus, status: Status) -> Text:
    if node.evicted:
        return Text("evicted", style="bold red")
    age_s = status.now_s - node.seen_s
    if age_s < 2:
        return Text("now")
    return Text(duration(age_s), style="yellow" if age_s > SILENT_S else "")


# --- figures and how they are written -----------------------------------------------------------------------


def eta_s(status: Status) -> float | None:
    """Seconds to the end at the pace of the last trained steps; None before the first."""
    times_s = [step["time_s"] for step in status.metrics if "time_s" in step][-ETA_STEPS - 1 :]
    left = status.steps - len(status.metrics)
    if not times_s:
        return None
    begun_s, steps = (times_s[0], len(times_s) - 1) if len(times_s) > 1 else (status.started_s, 1)
    step_s = max(times_s[-1] - begun_s, 0.0) / steps
    # The learner's clock may differ from the coordinator's: never count more than one step as under way.
    under_way_s = min(max(status.now_s - times_s[-1], 0.0), step_s)
    return max(left * step_s - under_way_s, 0.0)


def busy_frac(status: Status) -> float | None:
    """Share of the learner's time that was not spent waiting for rollouts, over all trained steps."""
    busy_s, waiting_s = total(status.metrics, "perf/busy_s"), total(status.metrics, "perf/waiting_s")
    return ratio(busy_s, busy_s + waiting_s)


def first_of(metrics: Sequence[dict[str, float]], key: str) -> float | None:
    return next((step[key] for step in metrics if key in step), None)


def total(metrics: Sequence[dict[str, float]], key: str) -> float:
    return sum(step.get(key, 0.0) for step in metrics)


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def clamp(value: int) -> int:
    """A whole number that a node stated, small enough for floats."""
    return min(value, 10**15)


def sparkline(values: Sequence[float], cells: int) -> str:
    """`values` as block characters from their lowest to their highest; means where `cells` are too few."""
    cells = min(max(cells, 4), len(values))
    edges = [index * len(values) // cells for index in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[3] * cells
    return "".join(BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))] for mean in means)


def clean(text: str) -> str:
    """Text from another machine without anything that moves a terminal's cursor or turns its direction."""
    return "".join(character if character.isprintable() else "?" for character in text)


def number(value: float | None, digits: int = 3) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    return NONE if value is None else f"{100 * value:.{digits}f} %"


def count(value: float | None) -> str:
    """812, 81.2k, 8.1M: at most five characters up to a trillion."""
    if value is None:
        return NONE
    for limit, unit in ((1e3, ""), (1e6, "k"), (1e9, "M"), (1e12, "G")):
        if value < limit * 0.9995:
            shown = value / limit * 1e3
            return f"{shown:.0f}{unit}" if not unit or shown >= 100 else f"{shown:.1f}{unit}"
    return f"{value / 1e12:.1f}T"


def memory(size_bytes: int, short: bool = False) -> str:
    mebibytes = clamp(size_bytes) / (1 << 20)
    if not mebibytes:
        return NONE
    value, unit = (f"{mebibytes:.0f}", "MiB") if mebibytes < 1000 else (f"{mebibytes / 1024:.1f}", "GiB")
    return f"{value}{unit[0]}" if short else f"{value} {unit}"


def duration(seconds: float | None) -> str:
    """42s, 6m 12s, 3h 05m, 2d 04h."""
    if seconds is None:
        return NONE
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02}h"


def _risen(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    return {name: n - before.get(name, 0) for name, n in now.items() if n > before.get(name, 0)}


def _counts(counts: dict[str, int]) -> str:
    """`proof 2, reward 1`, the most frequent first."""
    return ", ".join(
        f"{clean(name)} {n}" for name, n in sorted(counts.items(), key=lambda item: -item[1]) if n
    )

"""The figures of a run and how they are written: pure functions of a `Status` and of numbers.

Invariant: any number that a node may report gives a short text. Called by the view and by the report.
"""

from collections.abc import Sequence

from shoal.protocol.messages import Exactness, Grading, Signal, Status

SILENT_S = 30.0  # without a heartbeat for this long, a node is marked; the coordinator decides about its work
ETA_STEPS = 10  # newest steps whose pace the rest is expected to have
NO_SIGNAL_GROUPS = 32  # accepted groups in a row with equal rewards, from which on the view says so
BLOCKS = "▁▂▃▄▅▆▇█"
NONE = "–"


def eta_s(status: Status, metrics: Sequence[dict[str, float]]) -> float | None:
    """Seconds to the end at the pace of the last trained steps; None before the first."""
    times_s = [step["time_s"] for step in metrics if "time_s" in step][-ETA_STEPS - 1 :]
    left = status.steps - len(metrics)
    if not times_s:
        return None
    begun_s, steps = (times_s[0], len(times_s) - 1) if len(times_s) > 1 else (status.started_s, 1)
    step_s = max(times_s[-1] - begun_s, 0.0) / steps
    # The learner's clock may differ from the coordinator's: never count more than one step as under way.
    under_way_s = min(max(status.now_s - times_s[-1], 0.0), step_s)
    return max(left * step_s - under_way_s, 0.0)


def no_signal(signal: Signal) -> str:
    """`39 of the newest 39 groups had equal rewards, all 0.0`; empty while there are few of them."""
    if signal.flat < NO_SIGNAL_GROUPS or signal.lowest is None or signal.highest is None:
        return ""
    low, high = f"{signal.lowest:.4g}", f"{signal.highest:.4g}"
    values = f"all {signal.lowest:.4}" if low == high else f"from {low} to {high}"
    return f"{signal.flat} of the newest {signal.flat} groups had equal rewards, {values}: nothing to learn from"


def grader_errors(grading: Grading) -> str:
    """`the grader failed for 70 of the newest 512 completions (last: no module named numpy)`; empty if it did not."""
    if not grading.errors:
        return ""
    last = f" (last: {clean(grading.error)[:100]})" if grading.error else ""
    return f"the grader failed for {grading.errors} of the newest {grading.recent} completions{last}"


def exactness(exact: Exactness) -> str:
    """`exact  80 of these, 12.3k tokens`: what was accepted with every token equal to the last bit."""
    unequal = f", {count(exact.mismatched_tokens)} unequal tokens rejected" if exact.mismatched_tokens else ""
    return f"exact  {exact.submissions} of these, {count(exact.tokens)} tokens{unequal}"


def by_name(metrics: dict[str, float], kind: str, last: str) -> dict[str, float]:
    """The step's metrics `kind/NAME/last` by NAME: of each source, or of each target length."""
    parts = {tuple(name.split("/")): value for name, value in metrics.items()}
    return {
        found[1]: value for found, value in parts.items() if len(found) == 3 and (found[0], found[2]) == (kind, last)
    }


def useful_share(signal: Signal) -> str:
    """`63 % of 40 useful`, of the groups accepted for the open step; empty before the first."""
    share = ratio(signal.useful, signal.groups)
    return "" if share is None else f"{percent(share, 0)} of {signal.groups} useful"


def busy_frac(metrics: Sequence[dict[str, float]]) -> float | None:
    """Share of the learner's time that was not spent waiting for rollouts, over all trained steps."""
    busy_s, waiting_s = total(metrics, "perf/busy_s"), total(metrics, "perf/waiting_s")
    return ratio(busy_s, busy_s + waiting_s)


def first_of(metrics: Sequence[dict[str, float]], key: str) -> float | None:
    return next((step[key] for step in metrics if key in step), None)


def total(metrics: Sequence[dict[str, float]], key: str) -> float:
    return sum(step.get(key, 0.0) for step in metrics)


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def clamp(value: int) -> int:
    """A whole number that a node reported, made small enough for floats."""
    return min(value, 10**15)


def sparkline(values: Sequence[float], cells: int) -> str:
    """`values` as block characters from their lowest to their highest; means if there are more values than `cells`."""
    cells = min(max(cells, 4), len(values))
    edges = [index * len(values) // cells for index in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[3] * cells
    return "".join(BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))] for mean in means)


def clean(text: str) -> str:
    """Text from another machine without characters that move the cursor or change the writing direction."""
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


def counted(counts: dict[str, int], of: str = "") -> str:
    """`2 proof, 1 reward`, the most frequent first; `2 of worker-0`."""
    return ", ".join(f"{n} {of}{clean(name)}" for name, n in sorted(counts.items(), key=lambda item: -item[1]) if n)


def rejections(rejected: int, reasons: dict[str, int]) -> str:
    """`1 rejected: proof`, or `3 rejected: 2 proof, 1 unreadable`."""
    known = [name for name, n in reasons.items() if n]
    why = clean(known[0]) if len(known) == 1 else counted(reasons)
    return f"{rejected} rejected" + (f": {why}" if why else "")


def more(hidden: int) -> str:
    """`+2 more`, where rows or items are hidden; else empty."""
    return f"+{hidden} more" if hidden else ""


def middle(text: str, cells: int) -> str:
    """`text` in at most `cells` characters, without its middle: names begin and end with what tells them apart.

    >>> middle("words-of-seven-letters-3", 16)
    'words-of…tters-3'
    """
    end = (cells - 1) // 2
    return text if len(text) <= cells else f"{text[: cells - 1 - end]}…{text[len(text) - end :]}"


def words_in(text: str, cells: int) -> str:
    """As many whole words of `text` as fit; one that is longer alone is cut."""
    if len(text) <= cells:
        return text
    words = text[: cells - 1].rpartition(" ")[0] if text[cells - 1 : cells] != " " else text[: cells - 1]
    return f"{words.rstrip(' ,:;') or text[: cells - 1]}…"

"""Charts of the report as SVG text, without a script: lines, dots and stacked bars. `pictures` draws them as PNGs.

Invariant: every text is escaped, and colours are classes of the report's own style. Called by the report. The page draws its
charts itself (`static/chart.js`), because it answers the pointer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 24
Values = Sequence[float | None]


@dataclass(frozen=True)
class Line:
    name: str
    x: Sequence[float]
    y: Values
    look: str  # classes
    dots: bool = False


@dataclass(frozen=True)
class Bars:
    name: str
    y: Sequence[float]
    look: str


@dataclass(frozen=True)
class Chart:
    """Lines, or bars over the steps `x`. `least`: the y axis reaches that far."""

    name: str  # of its picture
    title: str
    lines: Sequence[Line] = ()
    x: Sequence[int] = ()
    bars: Sequence[Bars] = ()
    least: float = 0.0


def svg(chart: Chart) -> str:
    if chart.bars:
        return bar_chart(chart.title, chart.x, chart.bars)
    return line_chart(chart.title, chart.lines, least=chart.least)


def line_chart(title: str, lines: Sequence[Line], *, least: float = 0.0) -> str:
    xs = [x for line in lines for x in line.x]
    ys = [y for line in lines for y in line.y if y is not None]
    if not xs or not ys:
        return _empty(title)
    low, high = min([*ys, 0.0]), max([*ys, least])
    high += (high - low or 1.0) * 0.06
    x = _scale(min(xs), max(max(xs), min(xs) + 1), LEFT, WIDTH - RIGHT)
    y = _scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = _rows(low, high, y) + _columns([value for value in _ticks(min(xs), max(xs), 6) if value == int(value)], x)
    for line in lines:
        known = [(x(a), y(b)) for a, b in zip(line.x, line.y, strict=True) if b is not None]
        if line.dots:
            parts += [f'<circle class="{line.look}" cx="{a:.1f}" cy="{b:.1f}" r="4"/>' for a, b in known]
        else:
            points = " ".join(f"{a:.1f},{b:.1f}" for a, b in known)
            parts.append(f'<polyline class="line {line.look}" points="{points}"/>')
    return _frame(title, [(line.name, line.look) for line in lines if line.name], parts)


def bar_chart(title: str, x: Sequence[int], bars: Sequence[Bars]) -> str:
    bars = [bar for bar in bars if any(bar.y)]
    if not x or not bars:
        return _empty(title)
    tops = [sum(bar.y[index] for bar in bars) for index in range(len(x))]
    high = max(tops) * 1.06
    across = _scale(0.5, max(len(x), 8) + 0.5, LEFT, WIDTH - RIGHT)
    y = _scale(0.0, high, HEIGHT - BOTTOM, TOP)
    wide = max((across(2) - across(1)) * 0.84, 0.8)
    every = max(math.ceil(len(x) / 6), 1)
    parts = _rows(0.0, high, y)
    for index, label in enumerate(x):
        base = 0.0
        for bar in bars:
            if bar.y[index]:
                top = y(base + bar.y[index])
                parts.append(
                    f'<rect class="{bar.look}" x="{across(index + 1) - wide / 2:.1f}" y="{top:.1f}" width="{wide:.1f}"'
                    f' height="{max(y(base) - top, 0.6):.1f}"/>'
                )
                base += bar.y[index]
        if (index + 1) % every == 0:
            parts.append(_below(across(index + 1), str(label)))
    return _frame(title, [(bar.name, bar.look) for bar in bars], parts)


def _frame(title: str, names: Sequence[tuple[str, str]], parts: Sequence[str]) -> str:
    legend = "".join(f'<span><i class="{look}"></i>{escape(name)}</span>' for name, look in names)
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><div class="legend">{legend}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )


def _empty(title: str) -> str:
    return f'<figure><figcaption>{escape(title)}</figcaption><p class="soft">Nothing was recorded.</p></figure>'


def _rows(low: float, high: float, y: "Scale") -> list[str]:
    return [
        f'<path class="grid" d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}"/>'
        f'<text x="{LEFT - 7}" y="{y(value) + 3.5:.1f}" text-anchor="end">{value:g}</text>'
        for value in _ticks(low, high, 4)
    ]


def _columns(values: Sequence[float], x: "Scale") -> list[str]:
    return [_below(x(value), f"{value:g}") for value in values]


def _below(x: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(text)}</text>'


@dataclass(frozen=True)
class Scale:
    low: float
    slope: float
    start: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) * self.slope


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    return Scale(low, (end - start) / ((high - low) or 1.0), start)


def _ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round values that cover the range.

    >>> _ticks(0, 0.76, 4)
    [0.0, 0.2, 0.4, 0.6]
    """
    rough = (high - low) / wanted
    if rough <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]

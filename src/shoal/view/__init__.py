"""What a person sees of a running run: one screen in a terminal, one line per event anywhere else.

Invariant: a `Status` goes in, text comes out, and nothing that a node reports can break it: text is stripped of control
characters and cut to its column, and numbers are clamped before they are divided.
`shoal run` and `shoal status` call this with each Status they fetch; the report formats its figures with it.

    figures   numbers of a run, and how they are written
    pace      tokens per second of each node
    screen    the whole run
    sites     the learner's sites, if it has several
    tables    its tables: the tree of weights, and the nodes
    samples   what the model wrote
    events    what is new, line by line
    keys      keys pressed in the terminal
    live      screen, samples or events, as the console allows
    pool      the same for any pool: `shoal status`

Left out: fetching the Status (the caller does), and a log of the past (that is the ledger).
"""

from shoal.view.figures import (
    busy_frac,
    by_name,
    clean,
    count,
    counted,
    duration,
    first_of,
    grader_errors,
    memory,
    no_signal,
    number,
    percent,
    total,
)
from shoal.view.live import LiveView, Terminal
from shoal.view.pace import Pace
from shoal.view.samples import sample_lines
from shoal.view.screen import render

__all__ = [
    "LiveView",
    "Pace",
    "Terminal",
    "busy_frac",
    "by_name",
    "clean",
    "count",
    "counted",
    "duration",
    "first_of",
    "grader_errors",
    "memory",
    "no_signal",
    "number",
    "percent",
    "render",
    "sample_lines",
    "total",
]

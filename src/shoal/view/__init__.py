"""What a person sees of a run while it goes on: one screen in a terminal, one line per event anywhere else.

Invariant: a `Status` goes in, text comes out, and nothing that a node says of itself can break it: that is
stripped of control characters, cut to its column, and clamped before it is divided.
`shoal run` and `shoal status` call this with each Status they fetched; the report writes its figures with it.

    figures   numbers of a run, and how they are written
    pace      tokens per second of every node
    screen    all of it at once
    events    what is new, line by line
    live      either of them, as the console can show it

Left out: asking for the Status (the caller does), and a log of the past (that is the ledger).
"""

from shoal.view.figures import busy_frac, clean, count, duration, first_of, memory, number, percent, total
from shoal.view.live import LiveView
from shoal.view.pace import Pace
from shoal.view.screen import render

__all__ = [
    "LiveView",
    "Pace",
    "busy_frac",
    "clean",
    "count",
    "duration",
    "first_of",
    "memory",
    "number",
    "percent",
    "render",
    "total",
]

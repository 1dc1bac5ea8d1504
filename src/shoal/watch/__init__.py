"""What people see of a run: while it is on, in a terminal and on a page, and what it leaves behind as files and pictures.

    figures, pace, tree, sites   numbers of a run, and how they are written
    terminal/                    the screen of `shoal run` and `shoal pool status`; lines in a log; progress bars
    page/                        what all pages share: security headers, static files and theme, request guards
    record, trackers             metrics files, and the tracker that the config names
    summary, plot, estimates     the end of a run, runs side by side, intervals
    legs                         what `shoal run` measures itself

Invariant: nothing that a node reports can break what is shown: text is stripped of control characters, and numbers are
clamped before they are divided. Reads no coordinator's tables.
"""

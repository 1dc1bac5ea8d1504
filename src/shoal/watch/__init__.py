"""What people see of a run, while it is on and afterwards: one model, drawn in a terminal, on a page and as a curve.

    record, trackers   the files that a run leaves while it goes on, and the tracker that the config names
    run, figures       a run read from its folder or its coordinator's open routes; its figures, and how they are written
    terminal/          the screen of `shoal run` and `shoal pool status`, lines in a log, progress bars
    page/              `shoal dashboard` and its file (`--out`); headers, static files and guards of every page
    plot, estimates    the curve of a run; intervals
    summary            the end of a run, and what `shoal run` measured

Invariant: nothing that a node reports can break what is shown: text is stripped of control characters, and numbers are
clamped before they are divided. What is read are files and open routes, never the coordinator's tables.
"""

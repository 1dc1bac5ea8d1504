"""Views of a running or finished run. One data model is drawn in a terminal, on a web page and as a picture.

    record, trackers   the files that a run writes, and its tracker of metrics
    run, figures       a run, read from its folder or its coordinator's public routes; the figures that all views show
    terminal/          the screen of `shoal run` and `shoal pool status`, lines in a log, progress bars
    page/              `shoal dashboard` and its HTML report (`--out`); headers, static files and guards of every page
    plot, estimates    the reward curve as a picture; confidence intervals
    summary            the final summary, and what `shoal run` measured

Invariant: nothing that a node reports can break a view, because control characters are replaced, and numbers are
clamped before division. Views read files and public routes, never the coordinator's tables.
"""

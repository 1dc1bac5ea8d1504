"""Views of a running or finished run: one data model, drawn in a terminal, on a web page and as a picture.

    record, trackers   the files that a run writes as it goes, and the config's tracker
    run, figures       a run read from its folder or its coordinator's public routes; what all views derive from it
    terminal/          the screen of `shoal run` and `shoal pool status`, lines in a log, progress bars
    page/              `shoal dashboard` and its HTML report (`--out`); headers, static files and guards of every page
    plot, estimates    the curve of a run; confidence intervals
    summary            the final summary, and what `shoal run` measured

Invariant: nothing that a node reports can break a view: text is stripped of control characters, and numbers are clamped
before division. Views read files and public routes, never the coordinator's tables.
"""

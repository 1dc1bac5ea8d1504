"""The page on which people watch a run, live or finished, and the report that a run leaves as one HTML file.

    watched    a run's state and history, from its folder or its coordinator's open routes
    queries    every SQL statement of this room
    overview   is it learning, is it healthy, is anyone cheating: the answers, and the figures behind them
    curves     per step, with no more points than a chart shows
    nodes      the table of nodes, and the tree of weights
    timeline   who did what when: learner, relays, workers, validators as lanes
    rollouts   groups and rejected submissions, and what the model wrote in them
    ledger     the newest entries of the ledger, in words
    words      reasons and roles in plain words
    feed       what is new, to every open page at once
    server     the routes; `static/` holds the page
    report     the whole run as one file; `charts` says which charts it has, `drawing` and `pictures` draw them

Invariant: it only reads, and no answer holds a key, an invite or a signature.
"""

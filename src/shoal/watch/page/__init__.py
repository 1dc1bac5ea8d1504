"""The page on which people watch a run, live, finished or as a file; and what every page of Shoal is served with.

    overview    the three answers, nodes, curves          work       queue, rejections, groups, timeline
    rollouts    one submission token by token             report     the page as one file
    feed        what is new, to every open page at once   server     the routes; `static/` holds the page
    files       headers and static files of every page; `shared/` holds the theme
    guard       what a request must meet before its content is looked at

Invariant: it only reads, and no answer holds a key, an invite or a signature. `serve` uses `files` and `guard` alone.
"""

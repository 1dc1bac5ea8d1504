"""The page on which people watch a run, live, finished or as a file; and what every page of Shoal is served with.

    overview    the three answers, nodes, curves          work       queue, rejections, timeline
    server      what the page asks for                    report     the page as one file; `static/` holds the page
    files       headers and static files of every page; `shared/` holds the theme
    guard       what a request must meet before its content is looked at

Invariant: it only reads, and no answer holds a key, an invite or a signature. `serve` uses `files` and `guard` alone.
"""

"""The dashboard of a run, as a server or as one HTML file, and the code that all of Shoal's pages share.

    overview    headline answers, nodes, curves           work       queue, rejections, timeline
    server      the page's HTTP routes                    report     the page as one file; `static/` holds the page
    files       headers and static files of every page; `shared/` holds the theme
    guard       checks before a request's body is parsed

Invariant: the dashboard only reads, and no response contains a key, an invite or a signature. `shoal.serve` uses
only `files` and `guard`.
"""

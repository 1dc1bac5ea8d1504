"""DiLoCo: several sites train one model and synchronise once every few hundred steps. This package can be used on its own.

    agreed    the agreed state, and the outer step                   codec    64- to 4-bit numbers, with error feedback
    site      one site's side of a round                           remote   a site's connection to the meeting
    meeting   the sites' rounds; without networking                serve    the meeting over HTTP
    archive   the meeting's folder                                 messages messages between sites and meeting

Papers: DiLoCo (arXiv 2311.08105), OpenDiLoCo (2407.07852). Details are in docs/diloco.md.
"""

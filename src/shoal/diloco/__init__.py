"""DiLoCo: several sites train one model and talk once in hundreds of steps. Usable alone.

    outer      the outer step, and a site's pseudo-gradient     codec     numbers as 64 to 4 bits, with error feedback
    fragments  parts of the parameters that travel in turn      judge     which pseudo-gradients are averaged
    site       what one site holds and does at a round          meeting   rounds, without a network
    members    who takes part, and the shares of the data       archive   the meeting's folder
    serve      the meeting over HTTP (`shoal meet`)             remote    the site's side of it

Papers: DiLoCo (arXiv 2311.08105), OpenDiLoCo (2407.07852), Streaming DiLoCo (2501.18512). docs/diloco.md has the rest.
"""

"""DiLoCo: several sites train one model and talk once in hundreds of steps. Usable alone.

    agreed    what all sites agree on, and the outer step               codec    numbers as 64 to 4 bits, with error feedback
    site      what one site holds and does at a round                   remote   its way to the meeting over HTTP
    meeting   rounds, without a network                                 members  who takes part, and the shares of the data
    archive   the meeting's folder                                      serve    the meeting over HTTP
    messages  what sites and meeting tell each other

Papers: DiLoCo (arXiv 2311.08105), OpenDiLoCo (2407.07852). docs/diloco.md has the rest.
"""

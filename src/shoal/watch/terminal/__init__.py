"""Show a run on one screen that is redrawn, or as one line per event if the output is not a terminal.

Invariant: all text fits its column. These modules only draw; `shoal.watch.run` reads the run.
"""

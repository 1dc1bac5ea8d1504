"""Checks before a run: this machine and its disk (`machine`), and the run's memory and cores (`estimate`).

Invariant: nothing is started, changed or left behind, and each problem comes with its remedy.
"""

"""Check a machine before a run: what it is and does (`machine`), time and memory (`estimate`), disk (`disk`).

Invariant: nothing is started, changed or left behind, and each problem comes with its remedy.
"""

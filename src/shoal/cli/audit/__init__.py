"""Replays who contributed what to which step of a run, from its ledger and its files, and names the first broken link.

Invariant: nothing is believed because the coordinator says so, where a signature of another member, a digest or a
computation can say it. Nothing is written but in a temporary folder.
"""

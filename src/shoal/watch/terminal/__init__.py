"""A run in a terminal: one screen that is redrawn, or one line per event if the output is not a terminal.

Invariant: these modules only turn a `Status` into text that fits its column. The caller fetches the Status.
"""

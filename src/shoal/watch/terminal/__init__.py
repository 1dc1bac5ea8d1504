"""A run in a terminal: one screen that is redrawn, or one line per event if the output is not a terminal.

Invariant: a `Status` goes in, text comes out, cut to its column. The caller fetches the Status.
"""

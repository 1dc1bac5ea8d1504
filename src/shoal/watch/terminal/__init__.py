"""A run in a terminal: one screen that is redrawn, or one line per event where the output is no terminal.

Invariant: a `Status` goes in, text comes out; text is cut to its column. Left out: fetching the Status (the caller does).
"""

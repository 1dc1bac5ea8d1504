"""Continuous batching: rows, the text of a row, the scheduler that steps them all."""

"""Whom the pool believes and how closely it looks: classes, checking rates, second opinions, tests over many submissions."""

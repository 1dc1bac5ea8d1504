"""Checks submissions; the only one that can accept them."""

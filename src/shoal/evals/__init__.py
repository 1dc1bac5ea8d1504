"""Measures a published policy on tasks it never trained on."""

"""Pretraining on plain text, at one or several sites."""

"""Pretraining on plain text (`text`, `trainer`), alone or as one of several sites."""

"""Pretraining on plain text: `text`, `stream`, `trainer`, `checkpoint`, and `outer` for several sites."""

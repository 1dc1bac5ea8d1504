"""The whole pool as queues: `python -m simulate` in this folder's parent."""

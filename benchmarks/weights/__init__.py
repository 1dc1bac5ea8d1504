"""How weights travel: deltas, SHARDCAST and other ways to send a file."""

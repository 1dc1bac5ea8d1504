"""What the coordinator tells of its run: status, history, metrics."""

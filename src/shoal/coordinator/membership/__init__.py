"""Registration with an invite, and heartbeats."""

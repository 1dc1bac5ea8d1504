"""The append-only record of the pool: registrations, accepted and rejected work, slashing, policies and trained steps."""

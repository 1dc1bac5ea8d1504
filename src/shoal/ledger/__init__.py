"""The append-only record of who did what: registration, accepted work, rejections, slashing, policies and steps."""

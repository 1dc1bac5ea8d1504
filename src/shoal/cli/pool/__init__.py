"""`shoal pool` and `shoal coordinator`: a pool of several machines, its members, stakes, and the meeting of its sites."""

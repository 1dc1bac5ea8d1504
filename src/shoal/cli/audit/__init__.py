"""`shoal audit`: replay from a run's ledger and files who contributed what to which step, and name the first broken link.

Invariants: the coordinator's word is not enough where a member's signature, a digest or a computation can prove something.
Nothing is written, except in temporary folders.
"""

"""`shoal audit`: work out from a run's ledger and files who contributed what to each step; name the first broken link.

Invariants: the coordinator's word is not enough where a signature, a digest or a computation can prove the fact.
Nothing is written, except in temporary folders.
"""

"""`shoal audit`: work out from a run's ledger and files who contributed what to each step; name the first broken link.

Invariants: the audit never relies on the coordinator's word where a signature, a digest or a computation is proof.
Nothing is written, except in temporary folders.
"""

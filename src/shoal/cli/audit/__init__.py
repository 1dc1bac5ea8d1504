"""Replays who contributed what to which step of a run, from its ledger and its files, and names the first broken link.

    opened        the run's ledger, key, config, store and database, opened for reading
    chain         entries, co-signed heads, and the seal over the tables
    work          each entry against those before it, and against the files that it names
    pay           likewise, of entries about credit and punishments; `found` is what both collect
    standing      states of members in the sealed tables, against the ledger
    files         every other file of a run's folder that its members signed or hashed
    rerun         one step trained again from a checkpoint
    proofs        submissions judged again: a sample of the accepted, every hard rejection whose weights are there
    contribution  what each node did for each step
    audit         all of it, in order

Invariant: nothing is believed because the coordinator says so, where a signature of another member, a digest or a
computation can say it. Nothing is written but in a temporary folder.
Called by `shoal audit`.
"""

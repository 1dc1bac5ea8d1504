"""Replays who contributed what to which step of a run, from its ledger and its files, and names the first broken link.

    opened   the run's ledger, key, config, store and database, opened for reading; the end of its chain
    work     each entry against those before it, and against the files that it names
    pay      likewise, of entries about credit and punishments; what the walk collects
    files    every other file of a run's folder that its members signed or hashed
    again    one step trained again from a checkpoint; submissions judged again
    audit    all of it, in order; members' states, accounts on a chain, contributions

Invariant: nothing is believed because the coordinator says so, where a signature of another member, a digest or a
computation can say it. Nothing is written but in a temporary folder.
"""

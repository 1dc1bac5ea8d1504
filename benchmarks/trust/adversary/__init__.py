"""Workers that lie.

cheats   lies of a worker in a live run, which `liar.py` starts
attacks  the attack matrix, by name: lies about the work (`weights`), the tokens (`tokens`, `tolerance`),
         the report (`proofs`)
lab      the honest producer that every attack of the matrix extends
"""

"""Workers that lie.

cheats   workers that lie in a live run, started by `liar.py`
attacks  the attack matrix, by name: lies about the computation (`weights`), the tokens (`tokens`, `tolerance`, `nearly`),
         the report (`proofs`) and an environment's answers (`turns`)
lab      the honest producer that every attack of the matrix extends
"""

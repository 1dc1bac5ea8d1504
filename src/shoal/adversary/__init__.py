"""Workers that lie. No honest module imports this room.

cheats   the lies of the byzantine configs: processes that `shoal run` starts
attacks  the attack matrix, by name: lies about the work (`weights`), the tokens (`tokens`, `tolerance`),
         the report (`proofs`)
lab      the honest producer that every attack of the matrix extends
"""

"""Tests over many observations, by betting: pure mathematics, which knows nothing of pools, workers or tokens.

bets      what one observation pays: its e-value, of mean at most 1 under the honest hypothesis
process   the capital of a bettor who plays all observations of one worker; it may be looked at any time

Invariant: whatever an honest worker's numbers, its capital ever reaches 1 / alpha with probability at most alpha.
Called by the validator (bets that need a file's tokens), by the coordinator (the other bets, the process) and by
`tasks.missed`.
Source: Ramdas, Gruenwald, Vovk, Shafer 2023, "Game-theoretic statistics and safe anytime-valid inference"
(arXiv 2210.01948).
"""

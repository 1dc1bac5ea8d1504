"""The pool: who takes part, how they prove it, and the record of what they did."""

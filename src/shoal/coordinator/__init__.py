"""The pool's server: members, assignments, submissions, batches and trust, behind signed HTTP routes."""

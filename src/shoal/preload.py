"""Imported once by the process from which the children of `shoal run` are forked: what the roles need, and heavy.

What is not named here is imported by the child that needs it. Nothing may start a thread or compute at import.
"""

import gc

import shoal.broadcast
import shoal.cli
import shoal.evals.heldout
import shoal.learner.loop
import shoal.pool.service
import shoal.prepare
import shoal.rollout.torch_engine
import shoal.rollout.worker
import shoal.validator.service  # noqa: F401

gc.collect()
gc.freeze()  # the children's collectors leave these pages alone, so that they stay shared

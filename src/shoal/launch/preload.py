"""Imported once by the process from which the children of `shoal run` are forked: what the roles need, and heavy.

What is not named here is imported by the child that needs it. Nothing here may start a thread or compute.
"""

import gc
import signal
from importlib import import_module

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for `shoal run`, which ends its children

for module in (
    "shoal.roles.origin",
    "shoal.roles.relay",
    "shoal.cli",
    "shoal.evals.heldout",
    "shoal.learner.loop",
    "shoal.coordinator.service",
    "shoal.launch.prepare",
    "shoal.engine.torch_engine",
    "shoal.rollout.worker",
    "shoal.validator.service",
):
    import_module(module)

gc.collect()
gc.freeze()  # the children's collectors leave these pages alone, so that they stay shared

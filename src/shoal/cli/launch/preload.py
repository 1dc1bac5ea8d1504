"""Import the modules that all roles need, once, in the process from which the children of `shoal run` are forked.

Invariant: nothing here starts a thread or computes. A child imports any other module that it needs.
"""

import gc
import signal
from importlib import import_module

signal.signal(signal.SIGINT, signal.SIG_IGN)  # `shoal run` handles Ctrl-C and stops its children

for module in (
    "shoal.cli",
    "shoal.cli.origin_and_relay",
    "shoal.cli.roles",
    "shoal.evals.heldout",
    "shoal.learner.loop",
    "shoal.coordinator.http.serving",
    "shoal.cli.launch.prepare",
    "shoal.engine.torch_engine",
    "shoal.worker.loop",
    "shoal.validator.service",
):
    import_module(module)

gc.collect()
gc.freeze()  # children share these pages as long as their garbage collectors do not write to them

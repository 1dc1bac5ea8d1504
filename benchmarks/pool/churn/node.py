"""A process of the run under churn: enter its namespace, then run the command that `shoal run` would run.

    --namespace NAME MODULE ARGUMENT...

`__main__.py` starts this through `shoal.cli.launch.children`, which forks it.
"""

import ctypes
import importlib
from pathlib import Path

CLONE_NEWNET = 0x40000000


def main(argv: list[str]) -> int:
    _, name, module, *command = argv
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace of {name}")
    return int(importlib.import_module(module).main(command) or 0)

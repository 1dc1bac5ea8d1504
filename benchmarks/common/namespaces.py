"""Run a script in its own mount, network and process namespaces, which end with it. Needs root on Linux."""

import subprocess
import sys

from benchmarks.common.machine import INSIDE

APART = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def enter() -> None:
    """Restart this program in its own namespaces, unless it is in them."""
    if INSIDE not in sys.argv:
        again = ["setpriv", "--pdeathsig", "TERM", *APART, *sys.orig_argv, INSIDE]
        sys.exit(subprocess.run(again, check=False).returncode)

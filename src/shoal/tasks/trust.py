"""Whether the person who runs this machine trusts the author of the run with it.

Invariant: only the machine's environment says so, never the config. Called by `rewards/graders` and `adapters/verifiers`.
"""

import os

TRUST = "SHOAL_TRUST_RUN"  # set to 1 by that person


def trusted() -> bool:
    return os.environ.get(TRUST) == "1"

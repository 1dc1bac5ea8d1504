"""Start one worker that lies, in any pool for which there is an invite. `byzantine.py` adds such workers to a run.

    python -m benchmarks.trust.liar KIND --join INVITE --dir DIR

`adversary/cheats.py` describes the kinds. Every submission of each kind must be rejected.
"""

import argparse
import sys
from pathlib import Path
from typing import get_args

from benchmarks.trust.adversary.cheats import CHEATS
from shoal.cli.launch import process
from shoal.cli.roles import run_worker
from shoal.config import EngineName
from shoal.protocol.invite import read_invite

EVICTED = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(CHEATS))
    parser.add_argument("--join", required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engine", choices=get_args(EngineName), default="torch")
    arguments = parser.parse_args()
    stop = process.begin(f"worker that lies ({arguments.kind})", threads=arguments.threads)
    kind = CHEATS[arguments.kind]
    ended = run_worker(read_invite(arguments.join), arguments.dir, arguments.threads, stop, kind, arguments.engine)
    return EVICTED if ended == "evicted" else 0


if __name__ == "__main__":
    sys.exit(main())

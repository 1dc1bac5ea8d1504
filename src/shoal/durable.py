"""Making what was written survive a power cut.

Invariant: what `fsync` returned for is on the disk; a file that was renamed or linked needs it for its folder too.
Called by all that promise a file once it has its name: the store, the learner's checkpoints, a node's key. Knows nobody.
Left out: `shardcast`, which has its own since it imports nothing else of Shoal.
"""

import os
from pathlib import Path


def fsync(path: Path) -> None:
    """Return when what was written to this file, or what was named in this folder, is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Whether this process may claim an exactness class, and its fingerprint of a loaded model.

Called by the roles `worker` and `validator`, which report fingerprints in their heartbeats.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.config import Config

if TYPE_CHECKING:
    from shoal.model.dtype import DtypeName

log = logging.getLogger(__name__)


def fingerprinter(config: Config, dtype: DtypeName) -> Callable[[Any], str]:
    """A function that gives the fingerprint of a model; "" if its numerics are fast or the machine fails the self-test.

    The self-test runs at the first call.
    """
    from shoal.engine import selftest
    from shoal.model import numerics
    from shoal.model.fingerprint import fingerprint

    proven: list[bool] = []

    def of(model: Any) -> str:
        if numerics.of(model) != "exact":
            return ""
        if not proven:
            proven.append(selftest.passes(model, dtype, config.model.device))
            log.info("results %s on batch shapes here", "do not depend" if proven[0] else "depend")
        return fingerprint(model) if proven[0] else ""

    return of

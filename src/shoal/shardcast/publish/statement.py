"""The origin's statement of its newest version (`format/newest`), kept fresh in its store. Called by `origin`.

Invariant: statements have increasing serials, also after a restart and whatever the clock does.
"""

from __future__ import annotations

from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.shardcast.format.manifest import Manifest, public_key_hex
from shoal.shardcast.format.newest import Newest, SignedNewest
from shoal.shardcast.store import Store

STATE_S = 5.0  # between two statements that say the same


class Statement:
    def __init__(self, store: Store, key: Ed25519PrivateKey, run: str, clock: Callable[[], float]) -> None:
        self.store, self.key, self.run, self.clock = store, key, run, clock
        signed = store.newest
        self._said = signed.open(public_key_hex(key), run=run) if signed else None

    def renew(self, newest: Manifest) -> None:
        """Says that this is the newest version; at most every STATE_S, unless that changed."""
        said, now_s = self._said, self.clock()
        serial = int(now_s * 1e6)  # also a store that was restored from a backup continues after what it stated
        if said is not None:
            same = (said.publication, said.version) == (newest.publication, newest.version)
            if same and said.as_of_s <= now_s < said.as_of_s + STATE_S:
                return
            serial = max(serial, said.serial + 1)
        self._said = Newest.of(newest).model_copy(update={"serial": serial, "as_of_s": now_s})
        self.store.state(SignedNewest.sign(self._said, self.key))

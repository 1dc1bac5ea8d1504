"""What must be equal at all sites of a run, and for a folder to be resumed: each thing by its name.

Invariant: two that agree here compute the same thing from the same data. Called by `shoal pretrain` and `shoal meet`.
"""

from pathlib import Path

from shoal.config import Config
from shoal.diloco.messages import about_model
from shoal.learner.pretrain.text import Corpus

OWN = {  # what may differ from site to site, or between a stop and a resumption
    "pretrain": {"data", "micro_batch", "checkpoint_every"},
    "sites": {"wait_s", "give_up_s", "quorum", "sites", "host", "port", "url"},
}


def about(config: Config, folder: Path, corpus: Corpus | None, *, sites: bool) -> dict[str, str]:
    """`folder` is the model's. Without a corpus, whoever has one says which data it is."""
    found = about_model(folder) | {"run.seed": str(config.run.seed)}
    if corpus is not None:
        found["data"] = corpus.fingerprint()
    for name in ("pretrain", "sites") if sites else ("pretrain",):
        section = getattr(config, name)
        found |= {f"{name}.{key}": str(value) for key, value in section if key not in OWN[name]}
    return found

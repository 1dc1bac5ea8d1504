from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.learner.batch import micro_batches
from shoal.learner.groups import Group
from shoal.model.dtype import DtypeName
from shoal.model.load import load_model, save_model
from shoal.model.tree import Tree

from ..model.exactness import DTYPES, skip_unless_exact, states
from .support import make_groups, make_policy

pytestmark = pytest.mark.usefixtures("one_thread")


def validated(folder: Path, dtype: DtypeName, groups: Sequence[Group]) -> list[Group]:
    """The groups with the logprobs that a validator of the version in `folder` writes, each group in a row of its own."""
    model = load_model(folder, dtype, numerics="exact")
    found = []
    for group in groups:
        _, logp_N = states(model, [Tree(group.prompt, group.completions)], 0.8)
        lengths = [len(tokens) for tokens in group.completions]
        found.append(replace(group, behaviour=[part.tolist() for part in torch.split(logp_N, lengths)]))
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_policy_mismatch_kl_is_exactly_zero(
    tiny_folder: Path, tmp_path: Path, dtype: DtypeName, recompute: bool
) -> None:
    """At every published version: the divergence is 0, not small, though the masters are not what was published."""
    skip_unless_exact(dtype)
    settings: dict[str, Any] = {"temperature": 0.8, "dtype": dtype, "numerics": "exact"}
    trained = make_policy(tiny_folder, **settings, activation_checkpointing=recompute)
    folder = tiny_folder
    for version in range(3):
        groups = validated(folder, dtype, make_groups())
        rows = micro_batches(groups, row_tokens=32, normalize_std=False)
        for row in rows:
            assert torch.equal(trained.logprobs(row.pack)[0], row.behaviour_N)
        figures = trained.update(rows, sum(group.n_tokens for group in groups))
        assert figures["policy/mismatch_kl"] == 0.0
        assert figures["policy/clip_low"] == figures["policy/clip_high"] == 0.0
        folder = tmp_path / str(version)
        save_model(trained.model, trained.tokenizer, folder, trained.published(), trained.stored)


def test_one_changed_weight_shows(tiny_folder: Path) -> None:
    """The test above can fail."""
    skip_unless_exact("bfloat16")
    trained = make_policy(tiny_folder, temperature=0.8, dtype="bfloat16", numerics="exact")
    with torch.no_grad():
        next(iter(trained.weights.values()))[5, 3] += 0.5
    groups = validated(tiny_folder, "bfloat16", make_groups())
    rows = micro_batches(groups, row_tokens=32, normalize_std=False)
    assert trained.update(rows, sum(group.n_tokens for group in groups))["policy/mismatch_kl"] > 0

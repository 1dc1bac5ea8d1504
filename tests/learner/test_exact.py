"""With exact numerics the learner computes the same logprobs as the validator, bit for bit."""

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
    """Give the groups the logprobs that a validator computes with the version in `folder`, one group at a time."""
    model = load_model(folder, dtype, numerics="exact")
    result = []
    for group in groups:
        _, logp_N = states(model, [Tree(group.prompt, group.completions)], 0.8)
        lengths = [len(tokens) for tokens in group.completions]
        result.append(replace(group, behaviour=[part.tolist() for part in torch.split(logp_N, lengths)]))
    return result


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_policy_mismatch_kl_is_exactly_zero(tiny_folder, tmp_path, dtype, recompute):
    """The KL is zero for every published version, although the masters differ from the published weights."""
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

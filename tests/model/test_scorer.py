"""What may be switched on for speed or memory changes nothing of what is computed."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.model.load import load_model
from shoal.model.training import Scorer, compile_blocks
from shoal.model.tree import Tree, pack


def gradients(scorer: Scorer) -> list[torch.Tensor]:
    draw = random.Random(0)

    def tokens(n: int) -> list[int]:
        return [draw.randrange(4, 60) for _ in range(n)]

    packed = pack([Tree(tokens(9), [tokens(n) for n in (2, 6, 4)]) for _ in range(3)])
    scorer.zero_grad()
    logp_N, _ = scorer(packed, 1.0, False)
    logp_N.sum().backward()
    return [parameter.grad.clone() for parameter in scorer.parameters() if parameter.grad is not None]


def test_the_blocks_are_the_decoders_layers(tiny_model: Any) -> None:
    assert Scorer(tiny_model).layers == list(tiny_model.model.layers)


@pytest.mark.slow  # compiling takes about a minute
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_blocks_give_the_same_gradients(tiny_folder: Path) -> None:
    scorer = Scorer(load_model(tiny_folder))
    plain = gradients(scorer)
    compile_blocks(scorer)
    for mine, expected in zip(gradients(scorer), plain, strict=True):
        assert float((mine - expected).norm() / expected.norm()) < 1e-4

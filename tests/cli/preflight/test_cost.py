"""The formulas for a run's memory, checked on a case small enough to compute by hand.

`test_measured` compares them with whole runs; the cases here occur in no measured run.
"""

from dataclasses import replace

import pytest

from shoal.cli.preflight.estimate import (
    BASE_BYTES,
    SHARED_BYTES,
    SPARE,
    Sizes,
    SizesError,
    Work,
    memory_of,
    sizes_of,
    together,
    work_of,
)
from shoal.config import parse
from shoal.config.sections import ROW_TOKENS

SIZES = Sizes(hidden=4, intermediate=8, layers=2, width=4, kv_width=2, vocab=10, tied=True)
WORK = Work(prompt=5, longest=4, reference=False, recomputes=True, row_tokens=100, rows=3, at_once=4)


def test_sizes_are_read_from_a_config_json() -> None:
    config = {
        "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10,
        "num_key_value_heads": 1, "tie_word_embeddings": True,
    }  # fmt: skip
    assert sizes_of(config) == SIZES and sizes_of(config | {"head_dim": 8}).width == 16
    each = 4 * (4 + 2 + 2) + 4 * 4 + 3 * 4 * 8  # q, k, v, output; gate, up, down; 144 in all
    assert (SIZES.body, SIZES.head, SIZES.parameters) == (2 * each, 40, 2 * each + 40)
    assert replace(SIZES, tied=False).parameters == 2 * each + 80
    for changed, message in (
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": -4}, "org/model lacks hidden_size"),
        ({"num_local_experts": 8}, "mixture of experts"),
    ):
        with pytest.raises(SizesError, match=message):
            sizes_of(config | changed, "org/model")


def test_the_work_of_a_step_follows_from_its_config() -> None:
    learner = {
        "activation_checkpointing": True,
        "optimizer_steps_per_step": 5,
        "row_tokens": 4000,
        "loss": {"beta": 0.1},
    }
    config = parse(
        {
            "coordinator": {"prompts_per_step": 10},
            "sampling": {"group_size": 8, "max_tokens": 2000},
            "workers": {"groups_per_submission": 2},
            "learner": learner,
        }
    )
    work = work_of(config, 7)
    assert (work.at_once, work.longest, work.reference, work.recomputes) == (16, 2000, True, True)
    assert (work.row_tokens, work.rows) == (4000, -(-2 * (7 + 8 * 2000) // 4000))
    targets = config.tasks.model_copy(update={"length_targets": (6, 12)})
    work = work_of(config.model_copy(update={"tasks": targets}), 7)
    assert (work.row_tokens, work.rows) == (2 * (7 + 8 * 9), 1), "an update of two groups must fit in one row"


def test_memory_is_the_sum_of_weights_optimizer_state_activations_and_caches() -> None:
    saved = 2 * (4 * 4 + 2 * 4 + 2 * 2 + 3 * 8)  # bytes of one layer and token: 104
    # with recomputation, a token keeps the layers' inputs, one layer's activations, and gradients of that layer's MLP
    row = 2 * 4 * 2 + saved + 2 * 3 * 8
    learner = BASE_BYTES["learner"] + (4 + 12) * 328 + 100 * row + 2 * 4 * 10 * 100
    assert memory_of(SIZES, replace(WORK, rows=1), 2)["learner"] == learner
    assert memory_of(SIZES, WORK, 2)["learner"] == learner + 4 * 328, "several rows must add the sum of their gradients"
    assert memory_of(SIZES, replace(WORK, reference=True), 2)["learner"] == learner + (4 + 2) * 328
    whole = memory_of(SIZES, replace(WORK, rows=1, recomputes=False), 2)["learner"]
    assert whole == learner + 100 * (2 * saved - row)
    memory = memory_of(SIZES, WORK, 4)
    assert memory["worker"] == BASE_BYTES["worker"] + 4 * 328 + 4 * (5 + 4 + SPARE) * 32 + 2 * 4 * 4 * 10
    assert memory["validator"] == BASE_BYTES["validator"] + 4 * 328 + ROW_TOKENS * (2 * 4 * 10 + 4 * 52)
    assert together(memory, {"worker": 2}) == 2 * memory["worker"] - SHARED_BYTES

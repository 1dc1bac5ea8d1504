"""The formulas for a step's time and memory, checked on a case small enough to compute by hand.

`test_measured` compares them with whole runs; the cases here occur in no measured run.
"""

from dataclasses import replace

import pytest

from shoal.cli.preflight.estimate import (
    BASE_BYTES,
    COORDINATION_S,
    LOCAL_BPS,
    SHARED_BYTES,
    SPARE,
    WRITE_BPS,
    Sizes,
    SizesError,
    Speed,
    Work,
    attention_flops,
    dense_flops,
    memory_of,
    sizes_of,
    step_seconds,
    together,
    work_of,
)
from shoal.config import parse

SIZES = Sizes(hidden=4, intermediate=8, layers=2, width=4, kv_width=2, vocab=10, tied=True)
WORK = Work(
    trained=3, generated=4, completions=2, prompt=5, length=3, longest=4, updates=2, reference=False, recomputes=True,
    row_tokens=100, rows=3, at_once=4, validator_tokens=50,
)  # fmt: skip
MACHINE = Speed(dense=500.0, attention=200.0, decode=100.0, bandwidth_Bps=50.0)


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
    work = work_of(config, prompt=7, length=9, useful=0.75)
    assert (work.trained, work.generated, work.at_once, work.passes, work.longest) == (10, 14, 16, 5, 2000)
    assert (work.row_tokens, work.rows) == (2 * (7 + 8 * 9), 1), "an update of two groups must fit in one row"
    assert work_of(config, prompt=7, length=1000).rows == -(-2 * 8007 // 4000)


def test_a_steps_time_is_computed_for_each_role() -> None:
    pairs = 15 + 2 * (3 * 5 + 6)  # prompt with itself; each completion with the prompt and itself: 57
    dense, attention = 2 * (288 * (5 + 6) + 40 * 6), 4 * 2 * 4 * pairs
    assert (dense_flops(SIZES, WORK), attention_flops(SIZES, WORK)) == (dense, attention)
    forward_s = dense / 500 + attention / 200
    moved_s = 2 * (28 + 3 * 14) * 328 / 50  # the optimizer's state, and the gradients of three rows
    weights_s = 4 * 2 / 4 * 4 * 2 * 328 / 50  # read once per token until the longest completion has ended
    caches_s = 4 * 2 * 3 * 6.5 * 16 / 50  # each token reads the 5 + 3 / 2 tokens before it
    computing_s, prompts_s = 2 * 328 * 4 * 2 * 3 / 100, 2 * 288 * 5 * 4 / 500
    assert step_seconds(SIZES, WORK, 2, MACHINE) == pytest.approx(
        {
            "learner": 4 * 3 * forward_s + moved_s + 656 / WRITE_BPS,
            "rollouts": weights_s + caches_s + computing_s + prompts_s,
            "validation": 4 * forward_s,
            "broadcast": 656 / LOCAL_BPS,
            "coordination": COORDINATION_S,
        }
    )


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
    assert memory["validator"] == BASE_BYTES["validator"] + 4 * 328 + 2 * 4 * 10 * 50 + 50 * 4 * 52
    assert together(memory, {"worker": 2}) == 2 * memory["worker"] - SHARED_BYTES

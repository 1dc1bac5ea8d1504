"""Formulas against a case small enough to compute by hand."""

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
    activation_bytes,
    attention_flops,
    dense_flops,
    learner_s,
    memory_of,
    rollouts_s,
    sizes_of,
    speed,
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
FORWARD_S = 6816 / 500 + 1824 / 200


def test_sizes_are_read_from_a_config_json() -> None:
    config = {
        "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10,
        "num_key_value_heads": 1, "tie_word_embeddings": True,
    }  # fmt: skip
    assert sizes_of(config) == SIZES and sizes_of(config | {"head_dim": 8}).width == 16
    each = 4 * (4 + 2 + 2) + 4 * 4 + 3 * 4 * 8  # q, k, v, output; gate, up, down: 144
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
    config = parse(
        {
            "coordinator": {"prompts_per_step": 10},
            "sampling": {"group_size": 8, "max_tokens": 2000},
            "workers": {"groups_per_submission": 2},
            "learner": {
                "activation_checkpointing": True,
                "optimizer_steps_per_step": 5,
                "row_tokens": 4000,
                "loss": {"beta": 0.1},
            },
        }
    )
    work = work_of(config, prompt=7, length=9, useful=0.75)
    assert (work.trained, work.generated, work.at_once, work.passes, work.longest) == (10, 14, 16, 5, 2000)
    assert (work.row_tokens, work.rows) == (2 * (7 + 8 * 9), 1), "an update trains on two groups"
    assert work_of(config, prompt=7, length=1000).rows == -(-2 * 8007 // 4000)


def test_flops_of_a_group_count_its_prompt_once() -> None:
    pairs = 15 + 2 * (3 * 5 + 6)  # prompt with itself; each completion with the prompt and itself: 57
    dense, attention = 2 * (288 * (5 + 6) + 40 * 6), 4 * 2 * 4 * pairs
    assert (dense_flops(SIZES, WORK), attention_flops(SIZES, WORK)) == (dense, attention) == (6816, 1824)


def test_the_learner_computes_and_moves_its_optimizers_state() -> None:
    moved_s = 2 * (28 + 3 * 14) * 328 / 50
    assert learner_s(SIZES, WORK, MACHINE) == pytest.approx(4 * 3 * FORWARD_S + moved_s + 656 / WRITE_BPS)


def test_workers_read_their_weights_until_the_longest_has_ended() -> None:
    weights_s = 4 * 2 / 4 * 4 * 2 * 328 / 50
    caches_s = 4 * 2 * 3 * 6.5 * 16 / 50  # of each token: 5 + 3 / 2 tokens before it
    computed_s, prompts_s = 2 * 328 * 4 * 2 * 3 / 100, 2 * 288 * 5 * 4 / 500
    assert rollouts_s(SIZES, WORK, 2, MACHINE) == pytest.approx(weights_s + caches_s + computed_s + prompts_s)


def test_what_is_around_the_products_takes_the_same_time_at_any_peak() -> None:
    """950 GFLOP/s of two cores would take as long as what is around them."""
    slow, fast = (speed(flops, 1e10, 2) for flops in (95e9, 950e9))
    assert 1 / fast.dense == pytest.approx(1 / (0.9 * 950e9) + 1 / 950e9)
    assert 1 / slow.dense == pytest.approx(1 / (0.9 * 95e9) + 1 / 950e9)
    assert (slow.attention, slow.decode) == (fast.attention, fast.decode)


def test_a_step_is_the_work_of_all_roles() -> None:
    seconds = step_seconds(SIZES, WORK, 2, MACHINE)
    assert seconds["learner"] == learner_s(SIZES, WORK, MACHINE)
    assert seconds["rollouts"] == rollouts_s(SIZES, WORK, 2, MACHINE)
    assert seconds["validation"] == pytest.approx(4 * FORWARD_S)
    assert seconds["broadcast"] == pytest.approx(656 / LOCAL_BPS) and seconds["coordination"] == COORDINATION_S


def test_memory_of_the_learner_is_weights_gradient_masters_and_moments() -> None:
    saved = 2 * (4 * 4 + 2 * 4 + 2 * 2 + 3 * 8)  # bytes of one layer and token: 104
    row = 2 * 4 * 2 + saved + 2 * 3 * 8  # the layers' inputs, one layer, and gradients of its MLP
    assert activation_bytes(SIZES, WORK, 2) == 100 * row
    assert activation_bytes(SIZES, replace(WORK, recomputes=False), 2) == 100 * 2 * saved
    expected = BASE_BYTES["learner"] + (4 + 12) * 328 + 100 * row + 2 * 4 * 10 * 100
    assert memory_of(SIZES, replace(WORK, rows=1), 2)["learner"] == expected
    assert memory_of(SIZES, WORK, 2)["learner"] == expected + 4 * 328, "the sum of several rows' gradients"
    assert memory_of(SIZES, replace(WORK, reference=True), 2)["learner"] == expected + (4 + 2) * 328


def test_memory_of_those_that_only_infer() -> None:
    memory = memory_of(SIZES, WORK, 4)
    assert memory["worker"] == BASE_BYTES["worker"] + 4 * 328 + 4 * (5 + 4 + SPARE) * 32 + 2 * 4 * 4 * 10
    assert memory["validator"] == BASE_BYTES["validator"] + 4 * 328 + 2 * 4 * 10 * 50 + 50 * 4 * 52
    assert together(memory, {"worker": 2}) == 2 * memory["worker"] - SHARED_BYTES

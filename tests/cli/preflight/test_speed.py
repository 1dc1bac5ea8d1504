"""Every formula against a case small enough to compute by hand."""

import math
from dataclasses import replace

import pytest

from shoal.cli.preflight.memory import BASE_BYTES, CONTEXT_BYTES, SHARED_BYTES, SPARE, activation_bytes, memory_of
from shoal.cli.preflight.speed import (
    COORDINATION_S,
    LOCAL_BPS,
    LOCAL_S,
    WRITE_BPS,
    Pace,
    Speed,
    learner_s,
    pace,
    rollouts_s,
    speed,
    validation_s,
)
from shoal.cli.preflight.work import (
    Sizes,
    SizesError,
    Work,
    attention_flops,
    cache_bytes_per_token,
    dense_flops,
    forward_flops,
    sizes_of,
    training_flops,
    version_bytes,
    work_of,
)
from shoal.config import parse

SIZES = Sizes(hidden=4, intermediate=8, layers=2, width=4, kv_width=2, vocab=10, tied=True)
WORK = Work(
    trained=3, generated=4, completions=2, prompt=5, length=3, longest=4, updates=2, extra_forwards=1, row_tokens=100,
    rows=3, recomputes=True, at_once=4, validator_tokens=50,
)  # fmt: skip
MACHINE = Speed(1000.0, 100.0, 1e6, training=0.5, prefill=0.25, attention=0.2, decode=0.1, reading=0.5)


def test_parameters_are_the_matrices() -> None:
    each = 4 * (4 + 2 + 2) + 4 * 4 + 3 * 4 * 8  # q, k, v, output; gate, up, down: 144
    assert (SIZES.body, SIZES.head, SIZES.parameters) == (2 * each, 40, 2 * each + 40)
    assert Sizes(4, 8, 2, 4, 2, 10, tied=False).parameters == 2 * each + 80
    assert version_bytes(SIZES) == 2 * 328
    assert cache_bytes_per_token(SIZES, 2) == 2 * 2 * 2 * 2


def test_sizes_are_read_from_a_config_json() -> None:
    config = {
        "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10,
        "num_key_value_heads": 1, "tie_word_embeddings": True,
    }  # fmt: skip
    assert sizes_of(config) == SIZES
    assert sizes_of(config | {"head_dim": 8}).width == 16
    with pytest.raises(SizesError, match="vocab_size"):
        sizes_of({key: value for key, value in config.items() if key != "vocab_size"})
    with pytest.raises(SizesError, match="org/model: hidden_size = -4: a size is 1 or more"):
        sizes_of(config | {"hidden_size": -4}, "org/model")
    with pytest.raises(SizesError, match="head_dim = 0"):
        sizes_of(config | {"head_dim": 0})
    with pytest.raises(SizesError, match="mixture of experts"):
        sizes_of(config | {"num_local_experts": 8})


def test_flops_of_a_group_count_its_prompt_once() -> None:
    pairs = 15 + 2 * (3 * 5 + 6)  # prompt with itself; each completion with the prompt and itself: 57
    dense, attention = 2 * (288 * (5 + 6) + 40 * 6), 4 * 2 * 4 * pairs
    assert (dense_flops(SIZES, WORK), attention_flops(SIZES, WORK)) == (dense, attention) == (6816, 1824)
    assert forward_flops(SIZES, WORK) == 8640
    assert training_flops(SIZES, WORK) == (3 + 1) * 8640 * 3


def test_the_work_of_a_step_follows_from_its_config() -> None:
    config = parse(
        {
            "tasks": {"sources": [{"generator": "arithmetic"}]},
            "coordinator": {"prompts_per_step": 10},
            "sampling": {"group_size": 8, "max_tokens": 2000},
            "workers": {"groups_per_submission": 2},
            "learner": {
                "activation_checkpointing": True,
                "optimizer_steps_per_step": 5,
                "row_tokens": 4000,
                "loss": {"beta": 0.1},
            },
            "model": {"device": "cuda"},
        }
    )
    work = work_of(config, prompt=7, length=9, useful=0.75)
    assert (work.trained, work.generated, work.at_once, work.extra_forwards) == (10, 14, 16, 2)
    tokens = 2 * (7 + 8 * 9)  # an update trains on two groups
    assert (work.row_tokens, work.rows, work.longest) == (tokens, 1, config.sampling.max_tokens)
    longer = work_of(config, prompt=7, length=1000, useful=0.75)
    assert (longer.row_tokens, longer.rows) == (
        config.learner.row_tokens,
        math.ceil(2 * 8007 / config.learner.row_tokens),
    )
    unfiltered = config.model_copy(
        update={"coordinator": config.coordinator.model_copy(update={"online_filter": False})}
    )
    assert work_of(unfiltered, prompt=7, length=9, useful=0.75).generated == 10


def test_the_learner_computes_and_moves_its_optimizers_state() -> None:
    computed_s = 4 * 3 * (6816 / 0.5 + 1824 / 0.2) / 1000
    moved_s = 2 * (28 + 3 * 14) * 328 / (100 * 0.5)
    expected_s = computed_s + moved_s + 656 / WRITE_BPS
    assert learner_s(SIZES, WORK, MACHINE) == pytest.approx(expected_s)


def test_workers_read_their_weights_until_the_longest_has_ended() -> None:
    rounds = 4 * 2 / 4
    weights_s = rounds * 4 * 2 * 328 / 50
    caches_s = 4 * 2 * 3 * 6.5 * 16 / 50  # of each token: 5 + 3 / 2 tokens before it
    computed_s = 2 * 328 * 4 * 2 * 3 / 100
    prompts_s = 2 * 288 * 5 * 4 / 250
    expected_s = weights_s + caches_s + computed_s + prompts_s
    assert rollouts_s(SIZES, WORK, 2, MACHINE) == pytest.approx(expected_s)


def test_validation_prefills_what_was_generated() -> None:
    each_s = 6816 / 250 + 1824 / 200
    assert validation_s(SIZES, WORK, MACHINE) == pytest.approx(4 * each_s)


def test_what_is_around_the_products_takes_the_same_time_at_any_peak() -> None:
    """950 GFLOP/s of two cores would take as long as what is around them."""
    slow, fast = (speed(flops, 1e10, 1e9, 2) for flops in (95e9, 950e9))
    assert 1 / (fast.flops * fast.training) == pytest.approx(1 / (0.9 * 950e9) + 1 / 950e9)
    assert 1 / (slow.flops * slow.training) == pytest.approx(1 / (0.9 * 95e9) + 1 / 950e9)
    assert slow.flops * slow.attention == pytest.approx(fast.flops * fast.attention)
    assert slow.flops * slow.decode == pytest.approx(fast.flops * fast.decode)


SECONDS = {"learner": 10.0, "rollouts": 8.0, "validation": 1.0, "broadcast": 6.0}
HALVES = {"learner": 0.5, "rollouts": 0.5, "validation": 0.5, "broadcast": 4 / 6}


@pytest.mark.parametrize(
    ("level", "step_s", "bottleneck"), [(0, 25.0, "waiting"), (1, 13.5, "all cores"), (5, 13.5, "all cores")]
)
def test_roles_with_a_part_of_the_cores_overlap(level: int, step_s: float, bottleneck: str) -> None:
    """Their work is 5 + 4 + 0.5 + 4 seconds of all cores."""
    found = Pace(SECONDS, level, HALVES)
    assert found.step_s == pytest.approx(step_s) and found.round_s == 25
    assert found.bottleneck.startswith(bottleneck)


def test_one_machine_does_everything_at_any_level() -> None:
    assert Pace(SECONDS, 5, {}).step_s == 25


def test_a_learner_with_few_of_the_cores_sets_the_pace() -> None:
    found = Pace(SECONDS, 2, dict.fromkeys(SECONDS, 0.25))
    assert (found.step_s, found.bottleneck) == (10.0, "learner")


def test_a_role_takes_longer_with_fewer_cores() -> None:
    found = pace(SIZES, WORK, 2, 1, MACHINE, {"learner": 0.5})
    assert found.seconds["learner"] == pytest.approx(2 * learner_s(SIZES, WORK, MACHINE))
    assert found.seconds["broadcast"] == pytest.approx(LOCAL_S + 656 / LOCAL_BPS)
    assert found.seconds["coordination"] == COORDINATION_S
    crowded = pace(SIZES, WORK, 2, 1, MACHINE, {"learner": 0.5, "rollouts": 1.0, "validation": 0.5})
    assert crowded.seconds["broadcast"] == pytest.approx(LOCAL_S + 2 * 656 / LOCAL_BPS)


def test_memory_of_the_learner_is_weights_gradient_masters_and_moments() -> None:
    saved = 2 * (4 * 4 + 2 * 4 + 2 * 2 + 3 * 8)  # bytes of one layer and token: 104
    row = 2 * 4 * 2 + saved + 2 * 3 * 8  # the layers' inputs, one layer, and gradients of its MLP
    assert activation_bytes(SIZES, WORK, 2) == 100 * row
    logits = 2 * 4 * 10 * 100
    expected = BASE_BYTES["learner"] + (4 + 12) * 328 + 100 * row + logits
    assert memory_of(SIZES, replace(WORK, rows=1), 2).roles["learner"] == expected
    assert memory_of(SIZES, WORK, 2).roles["learner"] == expected + 4 * 328  # the sum of several rows' gradients
    block, head = 288 / 2, 40
    gathered = 2 * (head + 3 * block) + (2 + 4) * block + 4 * head
    spread = CONTEXT_BYTES + 16 * 328 / 2 + gathered + 100 * row + logits
    assert memory_of(SIZES, WORK, 2, devices=2, cpu=False).roles["learner"] == spread


def test_memory_of_those_that_only_infer() -> None:
    memory = memory_of(SIZES, WORK, 4)
    assert memory.roles["worker"] == BASE_BYTES["worker"] + 4 * 328 + 4 * (5 + 4 + SPARE) * 32 + 2 * 4 * 4 * 10
    assert memory.roles["validator"] == BASE_BYTES["validator"] + 4 * 328 + 2 * 4 * 10 * 50 + 50 * 4 * 52
    both = memory.together({"worker": 2})
    assert both == 2 * memory.roles["worker"] - SHARED_BYTES

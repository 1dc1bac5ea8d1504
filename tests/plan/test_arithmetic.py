"""Every formula against a case small enough to compute by hand."""

import math
from dataclasses import replace

import pytest

from shoal.config import parse
from shoal.plan import Device, Fleet, Links, Plan, Sizes, SizesError, Work, memory_of, plan, sizes_of
from shoal.plan.devices import PAGEABLE, PINNED
from shoal.plan.memory import BASE_BYTES, CONTEXT_BYTES, SHARED_BYTES, SPARE, activation_bytes, largest_parameters
from shoal.plan.steps import (
    COORDINATION_S,
    LOCAL_BPS,
    LOCAL_S,
    WRITE_BPS,
    broadcast_s,
    learner_s,
    rollouts_s,
    validation_s,
)
from shoal.plan.work import (
    attention_flops,
    cache_bytes_per_token,
    dense_flops,
    forward_flops,
    training_flops,
    version_bytes,
    work_of,
)

SIZES = Sizes(hidden=4, intermediate=8, layers=2, width=4, kv_width=2, vocab=10, tied=True)
WORK = Work(
    trained=3, generated=4, completions=2, prompt=5, length=3, longest=4, updates=2, extra_forwards=1, row_tokens=100,
    rows=3, recomputes=True, at_once=4, validator_tokens=50,
)  # fmt: skip
DEVICE = Device(
    "d",
    flops=1000.0,
    bandwidth_Bps=100.0,
    memory_bytes=1e6,
    training=0.5,
    prefill=0.25,
    attention=0.2,
    decode=0.1,
    reading=0.5,
)


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
    with pytest.raises(SizesError, match="--sizes: hidden_size = -4: a size is 1 or more"):
        sizes_of(config | {"hidden_size": -4}, "--sizes")
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
                "offload": True,
                "loss": {"beta": 0.1},
            },
            "model": {"device": "cuda"},
        }
    )
    work = work_of(config, prompt=7, length=9, useful=0.75)
    assert (work.trained, work.generated, work.at_once, work.extra_forwards) == (10, 14, 16, 2)
    assert work.offloads
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
    computed_s = 4 * 3 * (6816 / 0.5 + 1824 / 0.2) / (2 * 1000)
    moved_s = 2 * (28 + 3 * 14) * 328 / (2 * 100 * 0.5)
    expected_s = computed_s + moved_s + 656 / WRITE_BPS
    assert learner_s(SIZES, WORK, Fleet(DEVICE, 2)) == pytest.approx(expected_s)


def test_workers_read_their_weights_until_the_longest_has_ended() -> None:
    rounds = 4 * 2 / 4
    weights_s = rounds * 4 * 2 * 328 / 50
    caches_s = 4 * 2 * 3 * 6.5 * 16 / 50  # of each token: 5 + 3 / 2 tokens before it
    computed_s = 2 * 328 * 4 * 2 * 3 / 100
    prompts_s = 2 * 288 * 5 * 4 / 250
    expected_s = (weights_s + caches_s + computed_s + prompts_s) / 5
    assert rollouts_s(SIZES, WORK, 2, Fleet(DEVICE, 5)) == pytest.approx(expected_s)


def test_validation_prefills_what_was_generated() -> None:
    each_s = 6816 / 250 + 1824 / 200
    assert validation_s(SIZES, WORK, Fleet(DEVICE, 3)) == pytest.approx(4 * each_s / 3)


@pytest.mark.parametrize(
    ("links", "rate_bps"),
    [
        (Links(origin_up_bps=800, relays=4), 800),
        (Links(origin_up_bps=8000, relay_up_bps=130, relays=4), 40),
        (Links(worker_down_bps=16, relay_up_bps=1e9), 16),
    ],
)
def test_a_broadcast_takes_as_long_as_its_slowest_hop(links: Links, rate_bps: float) -> None:
    assert broadcast_s(100, links, workers=10) == pytest.approx(800 / rate_bps)


def test_a_delta_shortens_a_broadcast_and_one_machine_has_none() -> None:
    assert broadcast_s(100, Links(worker_down_bps=8, delta=0.02), workers=1) == pytest.approx(2)
    assert broadcast_s(100, Links(), workers=1) == 0


def test_the_papers_broadcast_of_62_gb_at_590_megabits_takes_14_minutes() -> None:
    """INTELLECT-2 (arXiv 2505.07291): its 32B weights took about 14 minutes, about 590 Mb/s."""
    assert broadcast_s(62e9, Links(worker_down_bps=590e6), workers=100) / 60 == pytest.approx(14, rel=0.01)
    qwq = Sizes(hidden=5120, intermediate=27648, layers=64, width=5120, kv_width=1024, vocab=152064, tied=False)
    assert version_bytes(qwq) == pytest.approx(62e9, rel=0.06)  # 65.5 GB, 61 GiB


SECONDS = {"learner": 10.0, "rollouts": 8.0, "validation": 1.0, "broadcast": 6.0}


@pytest.mark.parametrize(("level", "step_s"), [(0, 25.0), (1, 12.5), (2, 10.0), (9, 10.0)])
def test_async_levels_overlap_what_a_synchronous_run_does_in_turn(level: int, step_s: float) -> None:
    found = Plan(SECONDS, together=False, async_level=level, price_per_h=36.0)
    assert found.step_s == step_s
    assert found.hiding_level == 2
    assert found.step_cost == pytest.approx(step_s / 100)
    assert found.bottleneck == ("learner" if level >= 2 else f"waiting: async level {level} hides too little, 2 would")
    assert found.busy("learner") == 10 / step_s


def test_one_machine_does_everything_at_any_level() -> None:
    assert Plan(SECONDS, together=True, async_level=5, price_per_h=0).step_s == 25


@pytest.mark.parametrize(
    ("level", "step_s", "bottleneck"), [(0, 25.0, "waiting"), (1, 13.5, "this machine"), (5, 13.5, "this machine")]
)
def test_roles_with_a_part_of_the_cores_overlap(level: int, step_s: float, bottleneck: str) -> None:
    """Their work is 5 + 4 + 0.5 + 4 seconds of all cores."""
    shares = {"learner": 0.5, "rollouts": 0.5, "validation": 0.5, "broadcast": 4 / 6}
    found = Plan(SECONDS, together=True, async_level=level, price_per_h=0, shares=shares)
    assert found.step_s == pytest.approx(step_s)
    assert found.bottleneck.startswith(bottleneck)


def test_a_learner_with_few_of_the_cores_sets_the_pace() -> None:
    found = Plan(SECONDS, together=True, async_level=2, price_per_h=0, shares=dict.fromkeys(SECONDS, 0.25))
    assert (found.step_s, found.bottleneck) == (10.0, "learner")


def test_on_one_machine_a_role_takes_longer_with_fewer_cores() -> None:
    fleet = Fleet(DEVICE)
    found = plan(SIZES, WORK, 2, 1, fleet, fleet, fleet, Links(), shares={"learner": 0.5})
    assert found.together and found.seconds["learner"] == pytest.approx(2 * learner_s(SIZES, WORK, fleet))
    assert found.seconds["broadcast"] == pytest.approx(LOCAL_S + 656 / LOCAL_BPS)


def test_a_plan_joins_the_roles_and_their_prices() -> None:
    found = plan(
        SIZES, WORK, 2, 1, Fleet(DEVICE, 2, 3.0), Fleet(DEVICE, 5, 1.0), Fleet(DEVICE), Links(worker_down_bps=8)
    )
    assert found.seconds["learner"] == learner_s(SIZES, WORK, Fleet(DEVICE, 2))
    assert found.seconds["broadcast"] == 656
    assert found.seconds["coordination"] == COORDINATION_S
    assert found.price_per_h == 11


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


def test_memory_of_a_learner_that_offloads() -> None:
    """What stays on the device, and what goes to the host; a CPU is its own host."""
    does = replace(WORK, offloads=True, extra_forwards=2)  # recomputed activations, and a reference model
    row = activation_bytes(SIZES, WORK, 2) + 2 * 4 * 10 * 100  # and logits
    weights, head = 2 * 328, 2 * 40
    one = memory_of(SIZES, does, 2, cpu=False)
    assert one.roles["learner"] == CONTEXT_BYTES + 2 * weights + head + row
    assert one.offloaded == (4 + 8 + 4) * 328 == memory_of(SIZES, replace(does, rows=1), 4, cpu=False).offloaded
    kept = memory_of(SIZES, replace(does, offloads=False), 2, devices=2, cpu=False)
    many = memory_of(SIZES, does, 2, devices=2, cpu=False)
    assert many.offloaded == 16 * 328 / 2 == kept.roles["learner"] - many.roles["learner"]
    assert memory_of(SIZES, does, 4, devices=2, cpu=False).offloaded == 20 * 328 / 2, "in fp32 shards and masters"
    assert memory_of(SIZES, does, 2) == memory_of(SIZES, replace(does, offloads=False), 2)
    assert kept.offloaded == 0


def test_what_is_offloaded_crosses_pcie_and_is_updated_on_the_host() -> None:
    device, does = replace(DEVICE, pcie_Bps=10.0, host_Bps=20.0), replace(WORK, offloads=True)
    for count, each, share in ((1, 2 * 3 + 2, PAGEABLE), (2, 3 * 4 * 2, PINNED)):  # 3 rows: 2 for one of two devices
        fleet = Fleet(device, count)
        moved = 2 * (28 + 3 * 14) * 328 / count
        slower_s = moved / (20 * 0.5) - moved / (100 * 0.5)
        crossing_s = 2 * each * 328 / count / (10 * share)
        found_s = learner_s(SIZES, does, fleet) - learner_s(SIZES, WORK, fleet)
        assert found_s == pytest.approx(slower_s + crossing_s)
    cpu = Fleet(replace(device, cpu=True))
    assert learner_s(SIZES, does, cpu) == learner_s(SIZES, WORK, cpu)


def test_memory_of_those_that_only_infer() -> None:
    memory = memory_of(SIZES, WORK, 4)
    assert memory.roles["worker"] == BASE_BYTES["worker"] + 4 * 328 + 4 * (5 + 4 + SPARE) * 32 + 2 * 4 * 4 * 10
    assert memory.roles["validator"] == BASE_BYTES["validator"] + 4 * 328 + 2 * 4 * 10 * 50 + 50 * 4 * 52
    both = memory.together({"worker": 2})
    assert both == 2 * memory.roles["worker"] - SHARED_BYTES


def test_what_fits_is_sixteen_bytes_a_parameter_or_two() -> None:
    assert largest_parameters(160.0, 2) == pytest.approx(18)
    assert largest_parameters(160.0, 2, lora=True) == pytest.approx(144)

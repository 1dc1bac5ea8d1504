"""A step's metrics of FLOPs, batches, updates, speed and memory have the right values and units."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.learner.groups import Fetched, Group
from shoal.learner.report import (
    Shape,
    batch_metrics,
    finite,
    forward_flops,
    memory_metrics,
    shape_of,
    speed_metrics,
    sync_metrics,
    training_flops,
    update_metrics,
)


def group(rewards: list[float], lengths: list[int], *, version: int = 0, prompt: int = 4) -> Group:
    completions = [[1] * n for n in lengths]
    behaviour = [[-0.5] * n for n in lengths]
    return Group("a", version, [1] * prompt, completions, behaviour, rewards)


def tiny(*, tied: bool, kv_heads: int = 2) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=kv_heads,
            tie_word_embeddings=tied,
            attn_implementation="eager",
        )
    )


def test_the_shape_counts_matrices_once_and_embeddings_never():
    layer = 4 * 16 * 16 + 3 * 16 * 24
    expected = Shape(body=3 * layer, head=40 * 16, layers=3, width=16)
    assert shape_of(tiny(tied=False)) == shape_of(tiny(tied=True)) == expected


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_flops_equal_those_that_pytorch_counts(kv_heads):
    """With a prompt of one token and one completion, the head computes nearly the same positions as the body."""
    model, length = tiny(tied=False, kv_heads=kv_heads), 9
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, length + 1, dtype=torch.long)).logits.sum().backward()
    shape = shape_of(model)
    # Eager attention computes all T x T pairs, and the head computes all T positions. The formula omits unneeded ones.
    full = (length + 1) ** 2
    needed = (length + 1) * (length + 2) / 2
    waste = 3 * (4 * shape.layers * shape.width * (full - needed) + 2 * shape.head)
    assert 3 * forward_flops(shape, 1, [length]) + waste == counter.get_total_flops()


def test_each_completion_attends_to_its_prompt_and_to_itself():
    shape = Shape(body=0, head=0, layers=2, width=8)
    pairs = (1 + 2) + 3 + (3 + 4 + 5)  # a prompt of 2 tokens, a completion of 1, and a completion of 3
    assert forward_flops(shape, 2, [1, 3]) == 4 * 2 * 8 * pairs


def test_a_reference_pass_adds_a_third_of_the_flops():
    shape, groups = Shape(body=10, head=5, layers=1, width=4), [group([0, 1], [2, 3])]
    alone = training_flops(shape, groups, extra_forwards=0)
    assert training_flops(shape, groups, extra_forwards=1) == pytest.approx(alone * 4 / 3)


def test_batch_metrics_are_means_over_the_groups_trained_on():
    first, second = group([0.0, 2.0], [8, 2], version=5), group([5.0, 5.0], [4, 2], version=3)
    metrics = batch_metrics(Fetched([first, second], refused=2, foreign=1), 5, max_tokens=8)
    assert metrics == {
        "reward/batch_mean": 3.0,
        "reward/std": 0.5,
        "completion/length_mean": 4.0,
        "completion/truncated_frac": 0.25,
        "completion/turns_mean": 1.0,
        "async/staleness_mean": 1.0,
        "async/staleness_max": 2.0,
        "async/refused": 2.0,
        "data/quarantined": 0.0,
        "data/implausible": 0.0,
        "data/foreign": 1.0,
    }
    assert not batch_metrics(Fetched([]), 5, max_tokens=8)["async/refused"]


def test_environment_tokens_count_only_towards_the_length_limit():
    turns = Group("s", 0, [1], [[4, 5, 6, 7, 8], [4]], [[-1.0] * 3, [-1.0]], [0.0, 1.0], [[2, 2], []])
    metrics = batch_metrics(Fetched([turns]), 0, max_tokens=5)
    assert (metrics["completion/length_mean"], metrics["completion/truncated_frac"]) == (2.0, 0.5)
    assert metrics["completion/turns_mean"] == 1.5


def test_policy_sums_become_means_per_token_and_norms_become_means_per_update():
    updates = [
        (30, {"policy/entropy": 30.0, "optim/grad_norm": 1.0, "optim/lr": 1e-6}),
        (10, {"policy/entropy": 50.0, "optim/grad_norm": 3.0, "optim/lr": 2e-6}),
    ]
    result = {"policy/entropy": 2.0, "optim/grad_norm": 2.0, "optim/lr": 2e-6, "optim/skipped": 0.0}
    assert update_metrics(updates) == result
    empty = [(0, {"policy/entropy": 0.0, "optim/grad_norm": 0.0, "optim/lr": 0.1})]
    assert update_metrics(empty) == {"optim/skipped": 0.0, "optim/grad_norm": 0.0, "optim/lr": 0.1}, (
        "without trained tokens, sums per token must be left out"
    )


def test_mfu_counts_only_training_time_but_tokens_per_second_counts_the_whole_step():
    figures = speed_metrics(n_tokens=1000, flops=6e12, train_s=20, busy_s=25, waiting_s=25, peak_gflops=600)
    assert figures["perf/mfu"] == pytest.approx(0.5)
    assert figures["perf/tokens_per_s"] == 20


def test_memory_is_measured_in_bytes():
    figures = memory_metrics("cpu")
    assert set(figures) == {"memory/rss_peak_bytes"}
    assert 50e6 < figures["memory/rss_peak_bytes"] < 1e12, "torch alone needs 50 MB, so the unit must be wrong"


def test_sync_bytes_is_the_size_of_the_versions_files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 70)
    (tmp_path / "config.json").write_bytes(b"x" * 30)
    assert sync_metrics(tmp_path, 0.5) == {"sync/bytes": 100.0, "sync/seconds": 0.5}


def test_a_metric_that_is_not_finite_is_left_out_and_logged(caplog):
    assert finite({"loss": 0.5, "policy/kl": math.inf, "optim/lr": math.nan}) == {"loss": 0.5}
    assert caplog.messages == ["metric policy/kl is inf and is left out", "metric optim/lr is nan and is left out"]

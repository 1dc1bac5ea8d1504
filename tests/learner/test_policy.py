"""One update: what it changes, what it must not, and that how a batch is cut up makes no difference."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.learner.batch import Group, MicroBatch, micro_batches
from shoal.learner.policy import DivergedError, Policy, round_to_bf16_

from .support import make_policy

pytestmark = pytest.mark.usefixtures("one_thread")


def groups() -> list[Group]:
    draw = torch.Generator().manual_seed(0)
    made = []
    for number in range(3):
        completions = [torch.randint(4, 60, (n,), generator=draw).tolist() for n in (3, 5, 4, 2)]
        behaviour = [[-4.0] * len(tokens) for tokens in completions]
        made.append(Group(f"s{number}", 0, [2, 10 + number, 20], completions, behaviour, [0.0, 1.0, 0.0, 1.0]))
    return made


N_TOKENS = sum(group.n_tokens for group in groups())


def batches(row_tokens: int = 64, rows: int = 4) -> Iterator[MicroBatch]:
    return micro_batches(groups(), row_tokens=row_tokens, rows_per_microbatch=rows, normalize_std=False)


def weights(of: Policy) -> dict[str, torch.Tensor]:
    """The fp32 masters."""
    with of.masters():
        return {name: parameter.detach().clone() for name, parameter in of.model.named_parameters()}


def test_an_update_changes_every_weight_and_counts(tiny_folder: Path) -> None:
    trained = make_policy(tiny_folder)
    before = weights(trained)
    told = trained.update(batches(), N_TOKENS)
    assert all(not torch.equal(before[name], now) for name, now in weights(trained).items())
    assert trained.updates == 1
    assert told["optim/lr"] == 1e-3 and told["optim/grad_norm"] > 0
    assert told["policy/entropy"] > 0 and told["policy/kl"] == 0


def test_updates_make_good_completions_likelier(tiny_folder: Path) -> None:
    trained = make_policy(tiny_folder)
    losses = [trained.update(batches(), N_TOKENS)["loss"] for _ in range(3)]
    assert losses[2] < losses[0]


@pytest.mark.parametrize(("warmup", "rates"), [(4, [0.25, 0.5, 0.75, 1.0, 1.0]), (1, [1.0, 1.0]), (0, [1.0, 1.0])])
def test_the_learning_rate_warms_up_in_steps_and_stays(tiny_folder: Path, warmup: int, rates: list[float]) -> None:
    trained = make_policy(tiny_folder, warmup_steps=warmup)
    told = [trained.update(batches(), N_TOKENS)["optim/lr"] for _ in rates]
    assert told == pytest.approx([1e-3 * rate for rate in rates])
    assert trained.optimizer.param_groups[0]["lr"] == pytest.approx(told[-1])


def test_the_gradient_is_clipped_and_its_norm_told_before(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = make_policy(tiny_folder, grad_clip=0.1)
    seen = []
    step = trained.optimizer.step

    def watched() -> None:
        grads = [p.grad for p in trained.model.parameters() if p.grad is not None]
        seen.append(float(torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))))
        step()

    monkeypatch.setattr(trained.optimizer, "step", watched)
    told = trained.update(batches(), N_TOKENS)
    assert told["optim/grad_norm"] > 0.2
    assert seen == [pytest.approx(0.1, rel=1e-3)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_diverged_update_leaves_weights_and_state_untouched(tiny_folder: Path, bad: float) -> None:
    trained = make_policy(tiny_folder)
    trained.update(batches(), N_TOKENS)
    before, moments = weights(trained), [s["exp_avg"].clone() for s in trained.optimizer.state.values()]
    first, *rest = batches(rows=1, row_tokens=20)
    spoilt = MicroBatch(first.pack, first.behaviour_N, torch.full_like(first.advantage_N, bad))
    with pytest.raises(DivergedError, match=r"update 1: .*lower learner\.lr"):
        trained.update([spoilt, *rest], N_TOKENS)
    assert all(torch.equal(before[name], now) for name, now in weights(trained).items())
    assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(moments, trained.optimizer.state.values(), strict=True))
    assert trained.updates == 1


def test_an_update_after_a_diverged_one_is_as_if_that_had_not_been(tiny_folder: Path) -> None:
    once, twice = make_policy(tiny_folder), make_policy(tiny_folder)
    once.update(batches(), N_TOKENS)
    (micro,) = batches(row_tokens=512)
    with pytest.raises(DivergedError):
        twice.update([MicroBatch(micro.pack, micro.behaviour_N, micro.advantage_N * float("nan"))], N_TOKENS)
    twice.update(batches(), N_TOKENS)
    assert all(torch.equal(a, weights(twice)[name]) for name, a in weights(once).items())


@pytest.mark.parametrize(("row_tokens", "rows"), [(20, 1), (20, 2), (8, 1)])
def test_a_batch_in_pieces_gives_the_same_update_as_whole(tiny_folder: Path, row_tokens: int, rows: int) -> None:
    loss = {"beta": 0.01, "entropy": 0.01}
    whole, pieces = make_policy(tiny_folder, loss=loss), make_policy(tiny_folder, loss=loss)
    assert len(list(batches(512))) == 1 and len(list(batches(row_tokens, rows))) > 1
    grads = []
    for trained, micro in ((whole, batches(512)), (pieces, batches(row_tokens, rows))):
        told = trained.step(lambda one, t=trained: t._loss(one, N_TOKENS)[0], micro)
        grads.append((told["loss"], told["optim/grad_norm"]))
    assert grads[1] == pytest.approx(grads[0], rel=1e-4)
    # Adam's first step is lr * sign(gradient): compare the averaged gradients that it kept
    for a, b in zip(whole.optimizer.state.values(), pieces.optimizer.state.values(), strict=True):
        torch.testing.assert_close(a["exp_avg"], b["exp_avg"], rtol=1e-3, atol=1e-7)


def test_what_is_told_is_summed_over_pieces(tiny_folder: Path) -> None:
    whole, pieces = make_policy(tiny_folder), make_policy(tiny_folder)
    a, b = whole.update(batches(512), N_TOKENS), pieces.update(batches(20, 1), N_TOKENS)
    assert b == pytest.approx(a, rel=1e-3, abs=1e-4)


def test_beta_holds_the_policy_to_its_reference_with_gradient(tiny_folder: Path) -> None:
    held = make_policy(tiny_folder, loss={"beta": 0.5})
    first = held.update(batches(), N_TOKENS)
    assert first["policy/kl"] == pytest.approx(0.0, abs=1e-5)  # it is the reference still
    assert held.update(batches(), N_TOKENS)["policy/kl"] > 0

    def pull() -> float:
        """The gradient's norm where no advantage is left: all of it comes from KL."""
        flat = [MicroBatch(m.pack, m.behaviour_N, torch.zeros_like(m.advantage_N)) for m in batches()]
        return held.update(flat, N_TOKENS)["optim/grad_norm"]

    assert pull() > 0
    assert all(p.grad is None for p in held.reference.parameters())


def test_without_beta_there_is_no_reference(tiny_folder: Path) -> None:
    free = make_policy(tiny_folder)
    assert free.reference is None
    flat = [MicroBatch(m.pack, m.behaviour_N, torch.zeros_like(m.advantage_N)) for m in batches()]
    assert free.update(flat, N_TOKENS)["optim/grad_norm"] == 0


def test_the_entropy_bonus_has_a_gradient(tiny_folder: Path) -> None:
    curious = make_policy(tiny_folder, loss={"entropy": 0.1})
    flat = [MicroBatch(m.pack, m.behaviour_N, torch.zeros_like(m.advantage_N)) for m in batches()]
    told = [curious.update(flat, N_TOKENS) for _ in range(3)]
    assert told[2]["policy/entropy"] > told[0]["policy/entropy"]


def test_logprobs_are_at_the_sampling_temperature(tiny_folder: Path) -> None:
    warm, hot = make_policy(tiny_folder), make_policy(tiny_folder, temperature=100.0)
    (micro,) = batches(512)
    with torch.no_grad():
        at_100, _ = hot.logprobs(micro.pack, with_entropy=False)
        at_1, _ = warm.logprobs(micro.pack, with_entropy=False)
    assert at_100.std() < at_1.std() / 50  # nearly uniform


def test_rounding_is_to_the_nearest_bfloat16_and_is_undone_exactly() -> None:
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1_000_000,), generator=draw).to(torch.int32)
    weight = bits.view(torch.float32)
    weight = torch.cat([weight[weight.abs() < 1e38], torch.tensor([0.0, -0.0, 1.0, 1 + 2**-8, -1 - 2**-8, 1 + 2**-9])])
    rounded = weight.clone()
    remainder = round_to_bf16_(rounded)
    assert torch.equal(rounded.bfloat16().float(), rounded)
    assert bool(((rounded - weight).abs() <= (weight.bfloat16().float() - weight).abs()).all())
    rounded.view(torch.int32).add_(remainder)
    assert torch.equal(rounded.view(torch.int32), weight.view(torch.int32))


def test_small_updates_add_up_though_no_single_one_moves_what_is_published(tiny_folder: Path) -> None:
    trained = make_policy(tiny_folder, lr=1e-6)
    name, moved = "model.layers.0.mlp.up_proj.weight", []
    published = dict(trained.model.named_parameters())[name].detach()
    published.copy_(0.5 * published.sign())  # bf16 steps of 0.002 and more from here: Adam's of 1e-6 vanish in them
    start = published.clone()
    for _ in range(3):
        trained.update(batches(), N_TOKENS)
        assert torch.equal(published, start)
        moved.append(float((weights(trained)[name] - start).abs().max()))
    assert moved[0] > 5e-7 and moved[2] > 1.5 * moved[0]

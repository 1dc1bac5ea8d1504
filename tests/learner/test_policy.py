"""An update changes the right weights, however its batch is split. If memory runs out, the error says what to do."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from shoal.config.recipe import LearnerSection, LossKind
from shoal.errors import ShoalError
from shoal.learner.batch import MicroBatch, micro_batches, with_gradient
from shoal.learner.policy import OutOfMemoryError, Policy, explain_out_of_memory
from shoal.model import logprobs

from .support import N_TOKENS, batches, equal, make_groups, make_policy, masters, state

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_update_changes_every_weight_and_is_counted(tiny_folder):
    trained = make_policy(tiny_folder)
    before = masters(trained)
    figures = trained.update(batches(), N_TOKENS)
    assert all(not torch.equal(before[name], now) for name, now in masters(trained).items())
    assert trained.updates == 1 and trained.update(batches(), N_TOKENS)["loss"] < figures["loss"]
    assert figures["optim/lr"] == 1e-3 and figures["optim/grad_norm"] > 0
    assert figures["policy/entropy"] > 0 and figures["policy/kl"] == 0


@pytest.mark.parametrize(("warmup", "rates"), [(4, [0.25, 0.5, 0.75, 1.0, 1.0]), (1, [1.0, 1.0]), (0, [1.0, 1.0])])
def test_the_learning_rate_warms_up_in_steps_and_stays_constant(tiny_folder, warmup, rates):
    trained = make_policy(tiny_folder, warmup_steps=warmup)
    figures = [trained.update(batches(), N_TOKENS)["optim/lr"] for _ in rates]
    assert figures == pytest.approx([1e-3 * rate for rate in rates])
    assert trained.optimizer.param_groups[0]["lr"] == pytest.approx(figures[-1])


def test_the_reported_gradient_norm_is_measured_before_clipping(tiny_folder, monkeypatch):
    trained = make_policy(tiny_folder, grad_clip=0.1)
    seen = []
    step = trained.optimizer.step

    def watched() -> None:
        grads = [p.grad for p in trained.masters.values() if p.grad is not None]
        seen.append(float(torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))))
        step()

    monkeypatch.setattr(trained.optimizer, "step", watched)
    figures = trained.update(batches(), N_TOKENS)
    assert figures["optim/grad_norm"] > 0.2
    assert seen == [pytest.approx(0.1, rel=1e-3)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_diverged_update_does_not_affect_the_next_update(tiny_folder, bad):
    once, twice = make_policy(tiny_folder), make_policy(tiny_folder)
    for trained in (once, twice):
        trained.update(batches(), N_TOKENS)
    first, *rest = batches(20)
    spoilt = replace(first, advantage_N=torch.full_like(first.advantage_N, bad))
    with pytest.raises(ShoalError, match=rf"update 1: the loss is -?{bad}, .*lower the learning rate"):
        twice.update([spoilt, *rest], N_TOKENS)
    assert equal(state(twice), state(once)) and twice.updates == 1
    for trained in (once, twice):
        trained.update(batches(), N_TOKENS)
    assert equal(state(twice), state(once))


def assert_same_gradients(one: Policy, other: Policy) -> None:
    """Compare Adam's averaged gradients, because its first step, lr * sign(gradient), does not show their size."""
    for a, b in zip(one.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        torch.testing.assert_close(a["exp_avg"], b["exp_avg"], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("row_tokens", [20, 8])
def test_a_batch_in_pieces_gives_the_same_update_as_one_row(tiny_folder, row_tokens):
    loss = {"beta": 0.01, "entropy": 0.01}
    whole, pieces = make_policy(tiny_folder, loss=loss), make_policy(tiny_folder, loss=loss)
    assert len(batches(512)) == 1 and len(batches(row_tokens)) > 1
    figures = whole.update(batches(512), N_TOKENS)
    assert pieces.update(batches(row_tokens), N_TOKENS) == pytest.approx(figures, rel=1e-4, abs=1e-5)
    assert_same_gradients(whole, pieces)


@pytest.mark.parametrize("kind", get_args(LossKind))
def test_computing_logits_in_slices_makes_no_difference(tiny_folder, kind, monkeypatch):
    """This includes gspo, whose gradients depend on whole rollouts."""
    loss = {"kind": kind, "beta": 0.01, "entropy": 0.01}
    whole, sliced = make_policy(tiny_folder, loss=loss), make_policy(tiny_folder, loss=loss)
    one = whole.update(batches(512), N_TOKENS)
    monkeypatch.setattr(logprobs, "PRODUCT_BYTES", 4 * 4 * whole.model.config.vocab_size)  # four tokens
    assert sliced.update(batches(512), N_TOKENS) == pytest.approx(one, rel=1e-4, abs=1e-5)
    assert_same_gradients(whole, sliced)


def test_gradients_move_to_the_masters_as_soon_as_they_are_complete(tiny_folder):
    trained = make_policy(tiny_folder, dtype="bfloat16")
    trained.accumulate(batches(20))
    assert all(weight.grad is None for weight in trained.weights.values())
    assert all(master.grad is not None and master.grad.dtype is torch.float32 for master in trained.masters.values())


def flat() -> list[MicroBatch]:
    """Return rows with advantages of 0, so that only KL and entropy have a gradient."""
    return [replace(micro, advantage_N=torch.zeros_like(micro.advantage_N)) for micro in batches()]


def test_beta_and_entropy_have_a_gradient_and_only_beta_needs_a_reference(tiny_folder):
    free, held = make_policy(tiny_folder), make_policy(tiny_folder, loss={"beta": 0.5})
    assert free.reference is None and free.update(flat(), N_TOKENS)["optim/grad_norm"] == 0
    # The KL is 0 here, because the policy still equals the reference.
    assert held.update(batches(), N_TOKENS)["policy/kl"] == pytest.approx(0.0, abs=1e-5)
    moved = held.update(flat(), N_TOKENS)
    assert moved["policy/kl"] > 0 and moved["optim/grad_norm"] > 0
    assert held.reference is not None and all(p.grad is None for p in held.reference.parameters())
    curious = make_policy(tiny_folder, loss={"entropy": 0.1})
    entropies = [curious.update(flat(), N_TOKENS)["policy/entropy"] for _ in range(3)]
    assert entropies[2] > entropies[0]


def test_logprobs_are_at_the_sampling_temperature(tiny_folder):
    warm, hot = make_policy(tiny_folder), make_policy(tiny_folder, temperature=100.0)
    (micro,) = batches(512)
    with torch.no_grad():
        at_100, _ = hot.logprobs(micro.pack, with_entropy=False)
        at_1, _ = warm.logprobs(micro.pack, with_entropy=False)
    assert at_100.std() < at_1.std() / 50  # nearly uniform


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_computed_and_published_weights_are_the_rounded_masters(tiny_folder, dtype):
    trained = make_policy(tiny_folder, dtype=dtype)
    for _ in range(2):
        computed = dict(trained.model.named_parameters())
        assert all(computed[name].dtype == getattr(torch, dtype) for name in computed)
        rounded = {name: master.bfloat16() for name, master in masters(trained).items()}
        assert equal({name: weight.detach().bfloat16() for name, weight in computed.items()}, rounded)
        assert all(torch.equal(weight.float(), weight.bfloat16().float()) for weight in computed.values())
        assert equal(dict(trained.published()), rounded)
        trained.update(batches(), N_TOKENS)
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters(trained).values())


def test_updates_too_small_for_bf16_add_up(tiny_folder):
    trained = make_policy(tiny_folder, lr=1e-6)
    name, moved = "model.layers.0.mlp.up_proj.weight", []
    with torch.no_grad():  # a bf16 step is 0.002 or more at these values; Adam's steps are 1e-6
        trained.masters[name].copy_(0.5 * trained.masters[name].sign())
    trained.round()
    start = masters(trained)[name]
    for _ in range(3):
        trained.update(batches(), N_TOKENS)
        assert torch.equal(trained.weights[name].detach(), start)
        moved.append(float((masters(trained)[name] - start).abs().max()))
    assert moved[0] > 5e-7 and moved[2] > 1.5 * moved[0]


@pytest.mark.parametrize("kind", get_args(LossKind))
def test_groups_without_a_gradient_do_not_change_the_update(tiny_folder, kind):
    groups = make_groups()
    groups[1] = replace(groups[1], rewards=[1.0] * 4)
    whole, chosen = (make_policy(tiny_folder, loss={"kind": kind}) for _ in range(2))
    figures = [
        policy.update(micro_batches(given, row_tokens=512, normalize_std=False), N_TOKENS)
        for policy, given in ((whole, groups), (chosen, with_gradient(groups, whole.config.loss)))
    ]
    for name in ("loss", "optim/grad_norm"):
        assert figures[1][name] == pytest.approx(figures[0][name], rel=1e-4)
    assert_same_gradients(whole, chosen)


def test_an_empty_update_changes_nothing(tiny_folder):
    policy = make_policy(tiny_folder)
    policy.update(batches(), N_TOKENS)
    before = state(policy)
    figures = policy.update([], N_TOKENS)
    assert (figures["loss"], figures["optim/grad_norm"]) == (0.0, 0.0)
    assert equal(state(policy), before)


FIELD = r"lower learner\.row_tokens \(now 4096\)"
SMALL, LOWERS = LearnerSection(row_tokens=4096), "learner.row_tokens (now 4096)"


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("CUDA out of memory.\nmore"), MemoryError()])
@pytest.mark.parametrize("recomputes", [False, True])
def test_an_out_of_memory_error_names_the_settings_to_change(error, recomputes):
    section = SMALL.model_copy(update={"activation_checkpointing": recomputes})
    with pytest.raises(OutOfMemoryError, match=FIELD) as caught, explain_out_of_memory(section, LOWERS):
        if error:
            raise error
        torch.empty(2**48)
    assert isinstance(caught.value, ShoalError) and caught.value.__cause__
    assert "\n" not in str(caught.value) and "more" not in str(caught.value)
    assert ("activation_checkpointing = true" in str(caught.value)) == (not recomputes)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("x"), KeyboardInterrupt()])
def test_other_errors_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, explain_out_of_memory(SMALL, LOWERS):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("again", ["update", "own_logprobs"])
def test_an_out_of_memory_error_leaves_the_policy_unchanged(tiny_folder, monkeypatch, again, one_thread):
    policy = make_policy(tiny_folder, row_tokens=4096)
    before = masters(policy)
    monkeypatch.setattr(policy.scorer, "forward", lambda *_: torch.empty(2**48))
    with pytest.raises(OutOfMemoryError, match=FIELD):
        if again == "update":
            policy.update(batches(), N_TOKENS)
        else:
            policy.own_logprobs(batches()[0])
    assert all(torch.equal(before[name], now) for name, now in masters(policy).items())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.embed_tokens.weight", float("nan"), "norm of the weights is nan"),
        ("model.layers.0.mlp.up_proj.weight", float("inf"), "norm of the weights is inf"),
        ("model.norm.weight", 1e38, "the (norm of the weights|logprob of a token) is (inf|nan)"),
    ],
)
def test_a_policy_from_which_nobody_can_sample_is_not_published(tiny_folder, tmp_path, name, value, message):
    """Workers and validators would compute NaN, and honest work would be rejected."""
    broken = make_policy(tiny_folder)
    with torch.no_grad():
        broken.masters[name].fill_(value)
    broken.round()
    with pytest.raises(ShoalError, match=f"{message}.*this version is not written: lower the learning rate"):
        broken.write(tmp_path / "v000001")
    assert not list(tmp_path.iterdir())


def test_finite_weights_with_infinite_logits_are_not_published(tiny_folder, tmp_path, monkeypatch):
    broken = make_policy(tiny_folder)
    monkeypatch.setattr(broken, "logprobs", lambda packed: (torch.tensor([0.0, float("nan")]), None))
    with pytest.raises(ShoalError, match="logprob of a token is nan"):
        broken.write(tmp_path / "v000001")

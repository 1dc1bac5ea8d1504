"""Adapters in place of weights: what is trained, what is published, what is kept, and that peft reads it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from shoal.learner import lora
from shoal.learner.checkpoint import Checkpoints, Progress
from shoal.learner.policy import Policy
from shoal.model.load import load_model, save_model

from .support import N_TOKENS, batches, equal, make_policy, state

peft: Any = pytest.importorskip("peft", reason="peft is not installed: pip install 'shoal[lora]'")
pytestmark = pytest.mark.usefixtures("one_thread")

SECTION = {"rank": 4, "alpha": 12.0, "targets": ["q_proj", "v_proj", "down_proj"]}
SCALE = 3.0


def adapted(folder: Path, **changed: Any) -> Policy:
    torch.manual_seed(0)  # adapters begin at random numbers
    return make_policy(folder, lora=SECTION, lr=1e-2, **changed)


def base_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def is_target(name: str) -> bool:
    return any(f".{target}." in name for target in SECTION["targets"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_the_start_the_base_is_published_under_its_own_names(tiny_folder: Path, dtype: Any) -> None:
    published = dict(adapted(tiny_folder, dtype=dtype).published())
    assert equal(published, base_of(tiny_folder))
    assert list(published) == list(dict(make_policy(tiny_folder).published()))


def test_only_adapters_are_trained(tiny_folder: Path) -> None:
    policy = adapted(tiny_folder)
    layers, targets = 2, len(SECTION["targets"])  # type: ignore[arg-type]
    assert len(policy.masters) == 2 * layers * targets
    assert all(".lora_A." in name or ".lora_B." in name for name in policy.masters)


def test_an_update_changes_what_has_an_adapter_and_nothing_else(tiny_folder: Path) -> None:
    policy, base = adapted(tiny_folder), base_of(tiny_folder)
    losses = [policy.update(batches(), N_TOKENS)["loss"] for _ in range(3)]
    assert losses[2] < losses[0]
    changed = {name for name, tensor in policy.published() if not torch.equal(tensor, base[name])}
    assert changed == {name for name in base if is_target(name)}


def test_what_is_published_is_the_weight_and_its_adapter_added_in_float32(tiny_folder: Path) -> None:
    policy, base = adapted(tiny_folder), base_of(tiny_folder)
    for _ in range(2):
        policy.update(batches(), N_TOKENS)
    for name, tensor in policy.published():
        wanted = base[name]
        if is_target(name):
            stem = name.removesuffix("weight")
            down_rI, up_Or = (policy.masters[f"{stem}lora_{which}.default.weight"].bfloat16().float() for which in "AB")
            wanted = (base[name].float() + SCALE * (up_Or @ down_rI)).bfloat16()
        assert torch.equal(tensor, wanted), name


def test_the_published_folder_is_a_plain_model_that_computes_the_same(tiny_folder: Path, tmp_path: Path) -> None:
    policy = adapted(tiny_folder)
    for _ in range(2):
        policy.update(batches(), N_TOKENS)
    save_model(policy.model, policy.tokenizer, tmp_path / "v", policy.published(), policy.stored)
    plain = make_policy(tmp_path / "v")
    (micro,) = batches(512)
    with torch.no_grad():
        found_N, wanted_N = (one.logprobs(micro.pack)[0] for one in (plain, policy))
        base_N = make_policy(tiny_folder).logprobs(micro.pack)[0]
    assert float((wanted_N - base_N).abs().max()) > 0.5  # the adapters matter
    assert float((found_N - wanted_N).abs().mean()) < 0.05  # the merged weights are rounded to bf16


def test_peft_reads_the_adapter_and_computes_the_same(tiny_folder: Path, tmp_path: Path) -> None:
    policy = adapted(tiny_folder)
    policy.update(batches(), N_TOKENS)
    assert policy.config.lora is not None
    for _ in range(2):  # a second one takes the first one's place
        lora.save(lora.adapters(policy.model), policy.config.lora, tmp_path / "adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    theirs = peft.PeftModel.from_pretrained(load_model(tiny_folder), str(tmp_path / "adapter")).eval()
    tokens_1T = torch.arange(4, 24)[None]
    with torch.no_grad():
        ours_1TV, theirs_1TV = policy.model(tokens_1T).logits, theirs(tokens_1T).logits
        base_1TV = load_model(tiny_folder)(tokens_1T).logits
    assert torch.equal(ours_1TV, theirs_1TV)
    assert not torch.allclose(ours_1TV, base_1TV, atol=1e-2)


def test_a_checkpoint_holds_adapters_alone_and_resumes_bit_for_bit(tiny_folder: Path, tmp_path: Path) -> None:
    policy = adapted(tiny_folder)
    policy.update(batches(), N_TOKENS)
    checkpoints = Checkpoints(tmp_path, policy)
    checkpoints.begin(Progress(step=1))
    checkpoints.finish()
    names: set[str] = set()
    for path in (tmp_path / "step-000001").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    assert all(".lora_" in name for name in names - {"rng_state", "steps"})
    assert len(names) == 2 + 3 * len(policy.masters)

    resumed = adapted(tiny_folder)
    Checkpoints(tmp_path, resumed).restore()
    assert equal(state(resumed), state(policy))
    assert policy.update(batches(), N_TOKENS) == resumed.update(batches(), N_TOKENS)
    assert equal(state(resumed), state(policy))


def test_recomputed_activations_give_the_same_adapters(tiny_folder: Path) -> None:
    kept, again = adapted(tiny_folder), adapted(tiny_folder, activation_checkpointing=True)
    for policy in (kept, again):
        for _ in range(2):
            policy.update(batches(20), N_TOKENS)
    assert equal(state(kept), state(again))


def test_the_adapters_own_config_says_what_it_is(tiny_folder: Path, tmp_path: Path) -> None:
    policy = adapted(tiny_folder)
    assert policy.config.lora is not None
    lora.save(lora.adapters(policy.model), policy.config.lora, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], set(config["target_modules"])) == (4, 12.0, set(SECTION["targets"]))  # type: ignore[call-overload]


def test_without_the_package_it_says_what_to_install(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(lora.MissingPeftError, match=r"pip install 'shoal\[lora\]'"):
        adapted(tiny_folder)

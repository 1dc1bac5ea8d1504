"""With LoRA, only adapters are trained. They are published, merged and saved so that the model computes the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shoal.engine.protocol import Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.errors import ShoalError
from shoal.learner.batch import MicroBatch
from shoal.learner.checkpoint import Checkpoints, LearnerProgress
from shoal.learner.masters import difference_from_merge, merge_adapters, write_adapter
from shoal.learner.policy import Policy
from shoal.model.adapters import TARGETS, Adapters, attach_, is_adapter
from shoal.model.load import load_model, save_model
from shoal.model.training import Scorer
from shoal.model.tree import Tree, pack

from ..model.exactness import skip_unless_exact, states
from .support import N_TOKENS, batches, equal, make_groups, make_policy, state

pytestmark = pytest.mark.usefixtures("one_thread")

SECTION = {"rank": 4, "alpha": 12.0}


def adapted(folder: Path, **changed: Any) -> Policy:
    torch.manual_seed(0)  # adapters start at random values
    return make_policy(folder, **{"lora": SECTION, "lr": 1e-2} | changed)


def save(policy: Policy, folder: Path) -> None:
    save_model(policy.model, policy.tokenizer, folder, policy.published(), policy.stored)


def base_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_version_is_the_base_with_adapters_that_change_nothing(tiny_folder, dtype):
    policy = adapted(tiny_folder, dtype=dtype)
    published, base = dict(policy.published()), base_of(tiny_folder)
    assert equal({name: tensor for name, tensor in published.items() if name in base}, base)
    others = [name for name in published if name not in base]
    assert others and all(is_adapter(name) for name in others)
    (micro,) = batches(512)
    with torch.no_grad():
        assert torch.equal(
            policy.logprobs(micro.pack)[0], make_policy(tiny_folder, dtype=dtype).logprobs(micro.pack)[0]
        )


def test_an_update_changes_only_the_adapters(tiny_folder):
    policy, base = adapted(tiny_folder), base_of(tiny_folder)
    before = {name: tensor.clone() for name, tensor in policy.published()}
    losses = [policy.update(batches(), N_TOKENS)["loss"] for _ in range(3)]
    assert losses[2] < losses[0]
    changed = {name for name, tensor in policy.published() if not torch.equal(tensor, before[name])}
    assert changed == set(before) - set(base)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lr", [1e-5, 1e-4, 1e-2])
def test_a_loaded_version_computes_exactly_what_the_learner_computes(tiny_folder, tmp_path, lr, dtype):
    """Versions hold the adapters unmerged, because rounding to bf16 would remove small updates from merged weights."""
    policy = adapted(tiny_folder, lr=lr, dtype=dtype)
    (micro,) = batches(512)
    start = gain(micro, policy.logprobs(micro.pack)[0])
    for _ in range(4):
        policy.update(batches(), N_TOKENS)
    learner_gain = gain(micro, policy.logprobs(micro.pack)[0]) - start
    save(policy, tmp_path / "v")
    loaded = Scorer(load_model(tmp_path / "v", dtype))
    assert learner_gain != 0
    assert gain(micro, loaded(micro.pack, 1.0, False)[0]) - start == learner_gain


def gain(micro: MicroBatch, logp_N: torch.Tensor) -> float:
    """Return the sum of advantage times logprob."""
    return float((logp_N.detach() * micro.advantage_N).double().sum())


def test_with_exact_numerics_the_learner_and_a_loaded_version_compute_equal_logprobs(tiny_folder, tmp_path):
    skip_unless_exact("bfloat16")
    policy = adapted(tiny_folder, dtype="bfloat16", numerics="exact")
    policy.update(batches(), N_TOKENS)
    save(policy, tmp_path / "v")
    model = load_model(tmp_path / "v", "bfloat16", numerics="exact")
    for group in make_groups():
        tree = Tree(group.prompt, group.completions)
        _, logp_N = states(model, [tree], 1.0)
        assert torch.equal(policy.logprobs(pack([tree]))[0], logp_N)


def test_an_engine_samples_with_the_adapters_of_each_version(tiny_folder, tmp_path):
    policy = adapted(tiny_folder)
    engine = TorchEngine("float32")
    sampling = Sampling(temperature=1.0, max_tokens=6, eos_ids=())
    drawn = []
    for version in range(2):
        folder = tmp_path / str(version)
        save(policy, folder)
        engine.load(folder)  # the second version replaces the first in place
        [[one]] = engine.generate([[5, 6, 7]], [[1]], sampling)
        logp_N, _ = policy.logprobs(pack([Tree([5, 6, 7], [one.tokens])]))
        torch.testing.assert_close(torch.tensor(one.logprobs), logp_N.detach(), rtol=1e-4, atol=1e-4)
        drawn.append(one.logprobs)
        policy.update(batches(), N_TOKENS)
    assert drawn[0] != drawn[1]


def assert_same_logits(result: Any, wanted: Any, base: Any, tolerance: float) -> None:
    """Compare two models, whose logits must differ from those of `base`."""
    tokens_1T = torch.arange(4, 24)[None]
    with torch.no_grad():
        result_1TV, wanted_1TV, base_1TV = (model(tokens_1T).logits for model in (result, wanted, base))
    torch.testing.assert_close(result_1TV, wanted_1TV, rtol=tolerance, atol=tolerance)
    assert not torch.allclose(wanted_1TV, base_1TV, atol=1e-2)


def test_merged_adapters_give_a_plain_model_that_computes_the_same(tiny_folder, tmp_path):
    policy = adapted(tiny_folder)
    for _ in range(2):
        policy.update(batches(), N_TOKENS)
    save(policy, tmp_path / "v")
    merge_adapters(tmp_path / "v", tmp_path / "model")
    plain, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not loading["unexpected_keys"] and not loading["missing_keys"] and plain.dtype == torch.float32
    assert_same_logits(plain, policy.model, load_model(tiny_folder), 1e-3)


def test_a_model_that_is_not_the_merge_is_named_by_its_first_other_tensor(tiny_folder, tmp_path):
    policy = adapted(tiny_folder)
    policy.update(batches(), N_TOKENS)
    save(policy, tmp_path / "v")
    merge_adapters(tmp_path / "v", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    merged = load_file(path)
    name = next(name for name in sorted(merged) if "q_proj" in name)
    for changed, expected in (
        ({name: merged[name] * (1 + 1e-6)}, ""),  # another machine's rounding
        ({name: merged[name] * (1 + 1e-3)}, name),
        ({name: merged[name].half()}, name),
        ({name: merged[name][:-1]}, name),
        ({"zzz.weight": torch.zeros(1)}, "zzz.weight"),
    ):
        save_file(merged | changed, path)
        assert difference_from_merge(tmp_path / "v", tmp_path / "model") == expected
    save_file({other: tensor for other, tensor in merged.items() if other != name}, path)
    assert difference_from_merge(tmp_path / "v", tmp_path / "model") == name
    for file in (tmp_path / "model" / "config.json", tmp_path / "model" / "tokenizer.json"):
        text = file.read_text()
        file.write_text(text + " ")
        assert difference_from_merge(tmp_path / "v", tmp_path / "model") == file.name
        file.write_text(text)


def test_training_continues_only_with_the_same_adapters(tiny_folder, tmp_path):
    policy = adapted(tiny_folder)
    policy.update(batches(), N_TOKENS)
    save(policy, tmp_path / "v")
    again = adapted(tmp_path / "v")
    assert again.masters.keys() == policy.masters.keys()
    assert equal(dict(again.published()), dict(policy.published()))
    with pytest.raises(ShoalError, match="has adapters already"):
        make_policy(tmp_path / "v", lora=SECTION | {"rank": 2})


def test_a_model_without_the_target_layers_is_refused(make_tiny):
    with pytest.raises(match=r"none of query is a linear layer.*'q_proj'"):
        attach_(make_tiny(0), Adapters(4, 12.0, ("query",)), exact=False)


def test_peft_loads_the_adapter_and_computes_the_same(tiny_folder, tmp_path):
    peft: Any = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    policy = adapted(tiny_folder)
    policy.update(batches(), N_TOKENS)
    save(policy, tmp_path / "v")
    write_adapter(tmp_path / "v", tmp_path / "adapter", str(tiny_folder))
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_folder)
    assert (config["r"], config["lora_alpha"], set(config["target_modules"])) == (4, 12.0, set(TARGETS))
    theirs = peft.PeftModel.from_pretrained(load_model(tiny_folder), str(tmp_path / "adapter")).eval()
    assert_same_logits(theirs, policy.model, load_model(tiny_folder), 1e-5)


def test_a_checkpoint_contains_only_adapters_and_resumes_bit_for_bit(tiny_folder, tmp_path):
    policy = adapted(tiny_folder)
    policy.update(batches(), N_TOKENS)
    checkpoints = Checkpoints(tmp_path, policy)
    checkpoints.begin(LearnerProgress(step=1))
    checkpoints.finish()
    names: set[str] = set()
    for path in (tmp_path / "step-000001").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    assert all(is_adapter(name) for name in names - {"rng_state", "steps"})
    assert len(names) == 2 + 3 * len(policy.masters)

    resumed = adapted(tiny_folder)
    Checkpoints(tmp_path, resumed).restore()
    assert equal(state(resumed), state(policy))
    assert policy.update(batches(), N_TOKENS) == resumed.update(batches(), N_TOKENS)
    assert equal(state(resumed), state(policy))

"""Loading refuses a model unless its logprobs in packed rows equal those of plain transformers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    CohereConfig,
    DeepseekV32Config,
    Gemma2Config,
    Gemma3Config,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
)
from transformers.models.llama import modeling_llama

from shoal.engine.protocol import Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.model import attention, support
from shoal.model.load import WEIGHTS, load_model
from shoal.model.logprobs import LogitChange, change_of
from shoal.model.support import (
    LENGTH,
    TOLERANCE,
    UnsupportedModelError,
    _trees,
    change_of_logits,
    check_logprobs_,
    long_sequence_field,
)
from shoal.model.training import Scorer
from shoal.model.tree import Tree, pack

from . import architectures

pytestmark = pytest.mark.usefixtures("one_thread")

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 64,
    "long_factor": [2.0] * 64,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16}),
        ("qwen3_moe", {}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
        ("mistral", {"sliding_window": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_with_full_attention_is_accepted(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    assert load_model(architectures.create(tmp_path, name, **config)).config.model_type == name


QUICK = ("qwen2", "gpt2", "granite", "lfm2", "bloom", "gemma2", "bert")  # all others are slow tests
TREES = [Tree(list(range(4, 24)), [[5, 6, 7], [8, 9]]), Tree([30, 31, 32], [list(range(33, 50))])]


def by_transformers(model: Any, trees: list[Tree], temperature: float = 1.0) -> torch.Tensor:
    """Return the logprobs of all completions, computed by transformers' eager attention for each sequence alone."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    parts = []
    for tree in trees:
        for completion in tree.completions:
            ids_1L = torch.tensor([[*tree.prompt, *completion]])
            logits_LV = model(input_ids=ids_1L, use_cache=False).logits[0].float() / temperature
            logp_LV = logits_LV[len(tree.prompt) - 1 : -1].log_softmax(-1)
            parts.append(logp_LV.gather(-1, torch.tensor(completion)[:, None])[:, 0])
    model.set_attn_implementation(own)
    model.config._attn_implementation = own
    return torch.cat(parts)


def each(names: tuple[str, ...]) -> Any:
    slow = pytest.mark.slow
    return pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else slow) for name in names])


@each(architectures.PACKED)
def test_learner_and_engine_compute_an_accepted_architecture_correctly(tmp_path: Path, name: str) -> None:
    loaded = load_model(architectures.create(tmp_path, name))
    expected_N = by_transformers(loaded, TREES, 0.7)
    logp_N, entropy_N = Scorer(loaded)(pack(TREES), 0.7, True)
    torch.testing.assert_close(logp_N, expected_N.detach(), rtol=1e-4, atol=1e-4)
    (logp_N.sum() + entropy_N.sum()).backward()  # type: ignore[union-attr]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in loaded.get_output_embeddings().parameters())
    engine = TorchEngine("float32")
    engine.model = loaded
    prompts = [list(range(4, 16)), [9, 8, 7]]
    groups = engine.generate(prompts, [[1, 2], [3]], Sampling(temperature=0.7, max_tokens=6, eos_ids=()))
    trees = [Tree(prompt, [c.tokens for c in group]) for prompt, group in zip(prompts, groups, strict=True)]
    sampled_N = torch.tensor([logprob for group in groups for c in group for logprob in c.logprobs])
    with torch.no_grad():
        torch.testing.assert_close(sampled_N, by_transformers(loaded, trees, 0.7), rtol=1e-4, atol=1e-4)


@each(architectures.REFUSED)
def test_an_architecture_that_packed_rows_would_compute_wrongly_is_refused(tmp_path: Path, name: str) -> None:
    folder = architectures.create(tmp_path, name)
    with pytest.raises(UnsupportedModelError, match=f"{folder}|cannot be replaced"):
        load_model(folder)


def test_the_documentation_names_every_tested_architecture() -> None:
    page = (Path(__file__).parents[2] / "docs/recipe.md").read_text()
    for name in (*architectures.PACKED, *architectures.REFUSED):
        assert f"`{name}`" in page, name


@pytest.mark.parametrize(
    ("name", "settings"),
    [("granite", {"logits_scaling": 4.0}), ("nanochat", {"final_logit_softcapping": 2.0})],
)
def test_gradients_through_scaled_and_capped_logits_equal_those_of_transformers(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    loaded = load_model(architectures.create(tmp_path, name, **settings))
    assert change_of(loaded) == (LogitChange(0.25) if name == "granite" else LogitChange(1.0, 2.0))
    weights = [loaded.get_input_embeddings().weight, loaded.model.layers[0].self_attn.q_proj.weight]
    grads = torch.autograd.grad(Scorer(loaded)(pack(TREES), 0.7, False)[0].sum(), weights)
    expected = torch.autograd.grad(by_transformers(loaded, TREES, 0.7).sum(), weights)
    for grad, plain in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, plain, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (GraniteConfig(logits_scaling=4.0), LogitChange(0.25)),
        (CohereConfig(logit_scale=0.5), LogitChange(0.5)),
        (Gemma2Config(final_logit_softcapping=3.0), LogitChange(1.0, 3.0)),
        (LlamaConfig(), LogitChange()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_how_a_model_changes_its_logits_is_found_from_its_config_and_an_example(
    config: Any, change: LogitChange
) -> None:
    raw = 5 * torch.randn(40, 16)
    assert change_of_logits(config, raw, change(raw)) == change
    assert change_of_logits(config, raw, raw + raw.abs()) is None
    small = change_of_logits(config, 1e-6 * raw, change(1e-6 * raw))
    assert small is not None and small.cap == change.cap, "the cap was not found from small logits"


def test_the_difference_is_measured_in_float32_whatever_the_dtype(tmp_path: Path) -> None:
    """In bfloat16, rounding alone causes differences as large as those of a leaking state."""
    folder, differences = architectures.create(tmp_path, "lfm2"), []
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(UnsupportedModelError, match=r"Lfm2ForCausalLM.* by \S+ nats per token") as error:
            load_model(folder, dtype)
        differences.append(float(str(error.value).partition(" by ")[2].split()[0]))
    assert differences[0] == pytest.approx(differences[1], rel=0.05)


def test_the_comparison_leaves_the_model_and_the_random_state_as_they_were(tiny_folder: Path) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model = load_model(tiny_folder, "bfloat16")
    assert torch.equal(torch.get_rng_state(), state)
    stored = load_file(tiny_folder / WEIGHTS)
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in stored.items())
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    assert model.config._attn_implementation == attention.NAME
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_window_under_an_unknown_config_name_is_noticed(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config field with "window" in its name may be a window, so the compared sequences are longer than its value."""
    eager = modeling_llama.eager_attention_forward

    def windowed(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        at = torch.arange(query.shape[2])
        far = at[:, None] - at >= 100
        return eager(module, query, key, value, torch.where(far, torch.finfo(query.dtype).min, mask), **kwargs)

    model = load_model(tiny_folder)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", windowed)
    check_logprobs_(model, tiny_folder)  # passes, because its sequences are shorter than the window
    model.config.local_window_tokens = 100
    with pytest.raises(UnsupportedModelError, match="differ from plain transformers"):
        check_logprobs_(model, tiny_folder)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (Gemma3Config(text_config={"sliding_window": 16}), "sliding_window"),
        (MistralConfig(sliding_window=4096), "sliding_window"),
        (Llama4TextConfig(), "attention_chunk_size"),
        (DeepseekV32Config(), "index_topk"),
        (LlamaConfig(layer_types=["sliding_attention"] * 32), "layer_types: sliding_attention"),
        (Gemma2Config(sliding_window=None, layer_types=["full_attention"] * 26), "attn_logit_softcapping"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}), "rope_type: dynamic"),
        (LlamaConfig(rope_parameters=LONGROPE), "rope_type: longrope"),
        (LlamaConfig(), ""),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_model_that_treats_long_sequences_differently_is_identified_by_its_config(config: Any, field: str) -> None:
    assert long_sequence_field(config) == field


@pytest.mark.parametrize(("positions", "length"), [(12, 12), (LENGTH, LENGTH), (4096, LENGTH)])
def test_the_compared_sequences_fit_the_models_positions(positions: int, length: int) -> None:
    trees = _trees(SimpleNamespace(config=LlamaConfig(max_position_embeddings=positions)))
    lengths = {len(tree.prompt) + len(completion) for tree in trees for completion in tree.completions}
    assert lengths == {length}


@pytest.mark.parametrize("difference", [0.9 * TOLERANCE, 1.1 * TOLERANCE, float("nan")])
def test_the_mean_difference_decides_whether_a_model_is_refused(
    tiny_folder: Path, difference: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = support._own_logprobs

    def changed(model: Any, trees: list[Tree]) -> torch.Tensor:
        logp_N = own(model, trees)
        logp_N[: len(logp_N) // 2] += 2 * difference
        return logp_N

    monkeypatch.setattr(support, "_own_logprobs", changed)
    if difference < TOLERANCE:
        load_model(tiny_folder)
        return
    with pytest.raises(
        UnsupportedModelError, match=rf"{tiny_folder}.* by (0\.0011|nan) nats per token \(0\.001 is allowed"
    ):
        load_model(tiny_folder)

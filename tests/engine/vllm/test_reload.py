"""After a reload vLLM uses only the new weights, although it keeps copies of some weights.

These tests are slow and need vLLM.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from shoal.engine.protocol import Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.engine.vllm.client import VllmEngine
from shoal.model.load import save_model

from ...conftest import tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.12},
    **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
}
PROMPT, SEEDS = [5 + at * at % 40 for at in range(300)], list(range(8))  # vLLM caches the prompt under the old weights


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("config", "kind"),
    [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)],
    ids=["llama", "qwen2", "qwen3"],
)
def test_a_reload_replaces_every_weight(vllm_python: str, tmp_path: Path, config: type, kind: type, tied: bool) -> None:
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = kind(config(**SIZES, tie_word_embeddings=tied)).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name or "bias" in name:  # otherwise these are ones or zeros in both models
                    weight.add_(0.1 * torch.randn_like(weight))
        save_model(model, tiny_tokenizer(), tmp_path / str(seed))
    engine, torch_engine = VllmEngine("float32", 1, vllm_python), TorchEngine("float32")
    process = engine.process.pid
    sampling = Sampling(1.0, 16, (1,))
    for seed in (0, 1, 0):
        engine.load(tmp_path / str(seed))
        torch_engine.load(tmp_path / str(seed))
        [group], [expected] = (each.generate([PROMPT], [SEEDS], sampling) for each in (engine, torch_engine))
        assert [completion.tokens for completion in group] == [completion.tokens for completion in expected]
        for one, other in zip(group, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-3, rtol=0)
            torch.testing.assert_close(one.hidden_TH.float(), other.hidden_TH.float(), atol=1e-2, rtol=0.02)
    assert engine.process.pid == process and engine.process.poll() is None, "vLLM's process ended or was restarted"
    engine.close()

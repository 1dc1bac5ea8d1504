"""An attacker that generates with vLLM: `benchmarks/trust/attacks.py --engine vllm`.

vLLM generates with the current weights of the attack's torch model, including changed weights. An attack's other
computations, such as a forward over invented tokens, use the torch model itself. Lies that change the forward by a hook
would not reach vLLM. `REACH` names the lies that reach it.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.trust.adversary.attacks import ATTACKS
from benchmarks.trust.adversary.tokens import OtherSampling
from benchmarks.trust.adversary.weights import Fp8Cache
from shoal.engine.protocol import Completion, Respond, Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.engine.vllm.client import VllmEngine
from shoal.model.dtype import DtypeName
from shoal.model.load import load_tokenizer, save_model

KIND = "vllm/cpu"  # the engine that the headers of its submissions name
REACH = [
    name
    for name, attack in ATTACKS.items()
    if not issubclass(attack, Fp8Cache)
    and not (issubclass(attack, OtherSampling) and attack.change is not OtherSampling.change)
]


class ByVllm(TorchEngine):
    def __init__(self, dtype: DtypeName, threads: int) -> None:
        super().__init__(dtype)
        self.vllm = VllmEngine(dtype, threads)
        self.folder = Path()
        self.stale = True  # vLLM's weights differ from the model's

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.folder, self.stale = folder, True

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        respond: Respond | None = None,
    ) -> list[list[Completion]]:
        if self.stale:
            with tempfile.TemporaryDirectory() as name:
                save_model(self.model, load_tokenizer(self.folder), Path(name) / "weights")
                self.vllm.load(Path(name) / "weights")
            self.stale = False
        return self.vllm.generate(prompts, seeds, sampling, respond)

    def close(self) -> None:
        self.vllm.close()

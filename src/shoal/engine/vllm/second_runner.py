"""The draw inside vLLM's second model runner, GPUs' default: it has an interface and a seeded sampler of its own.

The runner keeps requests in slots. Each step it says which slot each row of logits belongs to and how many tokens that row
has seen, on the host, so nothing waits for the device but the states' copy.

    noise = "shoal"   as on the first runner: the token's logit becomes infinite, on the CPU
    noise = "vllm"    nothing is changed: vLLM's sampler draws, on the device, what `model.noise` computes again

Invariant: as in `extension`. Imported by vLLM, once Shoal knows which runner it takes (server.py).
Left out: speculative decoding, where a request has several rows.
"""

from typing import Any

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor

from shoal.engine.vllm.extension import RECORD, ShoalArguments


class SecondRunnerDraw(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.requests: dict[int, ShoalArguments] = {}  # by slot

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if "shoal" not in (sampling_params.extra_args or {}):
            raise ValueError("each request has extra_args['shoal'] (server.py)")

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.requests[req_idx] = ShoalArguments(**sampling_params.extra_args["shoal"])
        return True

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        slots = ctx.idx_mapping_np.tolist()
        if len(slots) != len(logits):
            raise RuntimeError(f"{len(logits)} rows of logits for {len(slots)} requests: no drafts were asked for")
        rows = []
        for row, (slot, seen) in enumerate(zip(slots, ctx.seq_lens_upper_bound_np.tolist(), strict=False)):
            request = self.requests[slot]
            at = seen - request.prompt
            if at >= request.first:  # otherwise in the middle of its prompt: vLLM drops what such a row draws
                rows.append((row, request, at))
        RECORD.draw_(logits, rows)
        return logits

"""The code that runs inside vLLM: it samples by seed, records each sampled token, and replaces weights in place.

vLLM is extended at three public points: `LogitsProcessor` (sampling), `worker_extension_cls` (`Extension`, called by
`collective_rpc`), and a forward pre-hook on the model's logits module. The hook receives exactly the final hidden states
that a step samples from, in the order of the rows that the logits processor sees. Prefix caching does no harm, because
vLLM never takes a prompt's last token from the cache.

    hook: hidden_BH -> vLLM: logits_BV -> SeededSampler: tokens_B, logprobs_B, by the seed -> vLLM takes the argmax

Invariant: each sampled token is recorded under its request and position, with its logprob and its hidden state, or the
process ends with an error.
Left out: vLLM's second model runner, which has another interface (`client` turns it off).
vLLM imports this module in its own environment, in one process (docs/operate.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from shoal.model.sampling import choose


@dataclass(frozen=True)
class SeededRequest:
    """The fields of `extra_args["shoal"]`."""

    id: str
    seed: int
    # The first token to sample, as a position in the completion. The tokens before it are in vLLM's prompt.
    first: int
    temperature: float


class Sampled(NamedTuple):
    """A token, its logprob, and the hidden state from which it was sampled. The state is bfloat16 and on the CPU."""

    token: int
    logprob: float
    state_H: Tensor


@dataclass
class SampleRecord:
    """The sampled tokens. The record is global, because vLLM does not connect the sampler with the extension."""

    hidden_BH: Tensor | None = None  # from which the current step's logits are computed
    # Keyed by request and position. Each chunk of a long prompt samples a token, too. vLLM discards that token, and the
    # next one replaces it here.
    sampled: dict[str, dict[int, Sampled]] = field(default_factory=dict)
    count: int = 0  # tokens sampled so far, over all requests

    def take_hidden(self, rows: int) -> Tensor:
        """Return and forget the step's hidden states. Raise RuntimeError unless there is one for each row of logits."""
        hidden_BH, self.hidden_BH = self.hidden_BH, None
        if hidden_BH is None or len(hidden_BH) != rows:
            count = 0 if hidden_BH is None else len(hidden_BH)
            raise RuntimeError(f"vLLM does not support this model: {rows} rows of logits have {count} hidden states")
        return hidden_BH


RECORD = SampleRecord()


class SeededSampler(LogitsProcessor):  # type: ignore[misc]
    """Samples every token by Shoal's seeded Gumbel-max, and makes its logit infinite, so that vLLM's argmax picks it.

    Requests set `temperature=0` for vLLM, and their own seed and temperature in `extra_args["shoal"]`.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        # Maps each row to its request and to the request's tokens so far, in a list to which vLLM appends.
        self.requests: dict[int, tuple[SeededRequest, list[int]]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if sampling_params.temperature != 0 or "shoal" not in (sampling_params.extra_args or {}):
            raise ValueError("each request needs temperature 0 and extra_args['shoal'] (server.py)")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def new(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> tuple[SeededRequest, list[int]]:
            return SeededRequest(**params.extra_args["shoal"]), output

        process_dict_updates(self.requests, batch_update, new)

    def apply(self, logits: Tensor) -> Tensor:
        """Sample and record a token for each row of `logits` (B, V). The logits of sampled tokens become infinite."""
        batch = [self.requests[row] for row in range(len(logits))]
        hidden_BH = RECORD.take_hidden(len(logits)).to("cpu", torch.bfloat16)
        for temperature in {request.temperature for request, _ in batch}:
            rows = [row for row, (request, _) in enumerate(batch) if request.temperature == temperature]
            requests = [batch[row][0] for row in rows]
            positions = [batch[row][0].first + len(batch[row][1]) for row in rows]
            logits_NV = logits if len(rows) == len(logits) else logits[rows]
            tokens_N, logprobs_N = choose(logits_NV, [request.seed for request in requests], positions, temperature)
            logits[rows, tokens_N] = torch.inf
            sampled = zip(rows, requests, positions, tokens_N.tolist(), logprobs_N.tolist(), strict=True)
            for row, request, position, token, logprob in sampled:
                state_H = hidden_BH[row].clone()
                RECORD.sampled.setdefault(request.id, {})[position] = Sampled(token, logprob, state_H)
        RECORD.count += len(logits)
        return logits


class Extension:
    """Methods added to vLLM's worker; `collective_rpc` calls them by name."""

    model_runner: Any  # an attribute of vLLM's worker

    def shoal_record(self) -> None:
        """Record the hidden states of every step from now on."""

        def keep(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            RECORD.hidden_BH = arguments[1] if len(arguments) > 1 else keywords["hidden_states"]

        model = self.model_runner.get_model()
        model.logits_processor.register_forward_pre_hook(keep, with_kwargs=True)

    def shoal_sampled(self) -> int:
        """Return the number of tokens sampled so far."""
        return RECORD.count

    def shoal_take(self, id: str) -> tuple[list[int], dict[str, Tensor]]:
        """Return a finished request's tokens in order, with hidden states (T, H) and logprobs (T,), and forget it."""
        samples = [sample for _, sample in sorted(RECORD.sampled.pop(id).items())]
        return [sample.token for sample in samples], {
            "hidden": torch.stack([sample.state_H for sample in samples]),
            "logprobs": torch.tensor([sample.logprob for sample in samples], dtype=torch.float32),
        }

    def shoal_reload(self, folder: str) -> None:
        """Replace all weights in place with those in a version's folder."""
        names = set()

        def weights() -> Iterator[tuple[str, Tensor]]:
            for path in sorted(Path(folder).glob("*.safetensors")):
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118 - safe_open returns no mapping
                        names.add(name)
                        yield name, file.get_tensor(name)

        self.reload_weights(weights_iterator=weights(), is_checkpoint_format=True)  # type: ignore[attr-defined]
        head = self.model_runner.get_model().lm_head
        # The head may be tied to the embedding. Then vLLM's CPU build keeps a packed copy of it, which is now outdated.
        if "lm_head.weight" not in names:
            head.quant_method.process_weights_after_loading(head)

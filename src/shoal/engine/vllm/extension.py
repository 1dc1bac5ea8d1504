"""What runs inside vLLM: Shoal's seeded sampling, a record of what was drawn from what, and weights replaced in place.

vLLM is extended at three public points: `LogitsProcessor` (the draw), `worker_extension_cls` (`Extension`, called by
`collective_rpc`), and a forward pre-hook on the model's logits module, which is given exactly the final hidden states that
a step draws from, in the order of the rows that the logits processor sees. So prefix caching does no harm: the last token
of a prompt is always computed.

    hook: hidden_BH -> vLLM: logits_BV -> SeededDraw: tokens_B, logprobs_B, by the seed -> vLLM takes the argmax

Invariant: each drawn token is recorded with its logprob and the hidden state it was drawn from, under its request and
position, or the process ends with an error.
Imported by vLLM in its own environment, for the V1 model runner in one process (docs/vllm.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from shoal.model.sampling import choose

Drawn = tuple[int, float, Tensor]  # token, logprob, hidden_H (bfloat16, on the CPU)


@dataclass
class Record:
    """What was drawn. One for the process: vLLM makes the processor and the extension itself, and knows of no third."""

    hidden_BH: Tensor | None = None  # that the logits at hand were computed from
    drawn: dict[str, dict[int, Drawn]] = field(default_factory=dict)  # by request and position, each drawn last
    count: int = 0  # of all tokens ever drawn

    def take_hidden(self, rows: int) -> Tensor:
        """The hidden states of the logits at hand, once. Raises RuntimeError if they are not of these rows."""
        hidden_BH, self.hidden_BH = self.hidden_BH, None
        if hidden_BH is None or len(hidden_BH) != rows:
            seen = "none" if hidden_BH is None else len(hidden_BH)
            raise RuntimeError(
                f"{rows} rows of logits, but {seen} of hidden states: this model has no usual logits module"
            )
        return hidden_BH


RECORD = Record()


@dataclass(frozen=True)
class Request:
    id: str
    seed: int
    first: int  # position of the request's first token within its completion
    temperature: float
    output: list[int]  # the tokens so far, which vLLM appends to

    @property
    def position(self) -> int:
        return self.first + len(self.output)


class SeededDraw(LogitsProcessor):  # type: ignore[misc]
    """Chooses every token by Shoal's seeded Gumbel-max, and leaves vLLM no other choice.

    Requests say `temperature=0` to vLLM, and their own seed and temperature in `extra_args["shoal"]`.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.requests: dict[int, Request] = {}  # by row

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if sampling_params.temperature != 0 or "shoal" not in (sampling_params.extra_args or {}):
            raise ValueError("each request has temperature 0 and extra_args['shoal'] (server.py)")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def new(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> Request:
            return Request(**params.extra_args["shoal"], output=output)

        process_dict_updates(self.requests, batch_update, new)

    def apply(self, logits: Tensor) -> Tensor:
        """logits [B, V], float32: the chosen token's becomes infinite."""
        hidden_BH = RECORD.take_hidden(len(logits)).to("cpu", torch.bfloat16)
        requests = [self.requests[row] for row in range(len(logits))]
        for temperature in {request.temperature for request in requests}:
            rows = [row for row, request in enumerate(requests) if request.temperature == temperature]
            of_rows = [requests[row] for row in rows]
            logits_NV = logits if len(rows) == len(logits) else logits[rows]
            tokens_N, logprobs_N = choose(
                logits_NV, [one.seed for one in of_rows], [one.position for one in of_rows], temperature
            )
            logits[rows, tokens_N] = torch.inf
            RECORD.count += len(rows)
            for row, one, token, logprob in zip(rows, of_rows, tokens_N.tolist(), logprobs_N.tolist(), strict=True):
                RECORD.drawn.setdefault(one.id, {})[one.position] = (token, logprob, hidden_BH[row].clone())
        return logits


class Extension:
    """Methods that vLLM's worker gains; `collective_rpc` calls them by name."""

    model_runner: Any  # the worker's

    def shoal_record(self) -> None:
        """Keep the hidden states of every step's logits from now on."""

        def keep(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            RECORD.hidden_BH = arguments[1] if len(arguments) > 1 else keywords["hidden_states"]

        model = self.model_runner.get_model()
        model.logits_processor.register_forward_pre_hook(keep, with_kwargs=True)

    def shoal_drawn(self) -> int:
        """How many tokens were ever drawn."""
        return RECORD.count

    def shoal_take(self, id: str) -> tuple[list[int], dict[str, Tensor]]:
        """All that a finished request drew, in order: tokens, and tensors logprobs [T] and hidden [T, H]. Forgets it."""
        of_request = RECORD.drawn.pop(id)
        drawn = [of_request[position] for position in sorted(of_request)]
        logprobs_T = torch.tensor([logprob for _, logprob, _ in drawn], dtype=torch.float32)
        hidden_TH = torch.stack([hidden_H for _, _, hidden_H in drawn])
        return [token for token, _, _ in drawn], {"logprobs": logprobs_T, "hidden": hidden_TH}

    def shoal_reload(self, folder: str) -> None:
        """Replace all weights by those of a version's folder, in place."""
        names = set()

        def weights() -> Iterator[tuple[str, Tensor]]:
            for path in sorted(Path(folder).glob("*.safetensors")):
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118 - a safe_open is no mapping
                        names.add(name)
                        yield name, file.get_tensor(name)

        self.reload_weights(weights_iterator=weights(), is_checkpoint_format=True)  # type: ignore[attr-defined]
        head = self.model_runner.get_model().lm_head
        if "lm_head.weight" not in names:  # tied to the embedding: vLLM's CPU build keeps a packed copy, and forgets it
            head.quant_method.process_weights_after_loading(head)

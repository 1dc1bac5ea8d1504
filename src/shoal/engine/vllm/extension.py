"""What runs inside vLLM: Shoal's seeded sampling, a record of what was drawn from what, and weights replaced in place.

vLLM is extended at three public points: `LogitsProcessor` (the draw), `worker_extension_cls` (`Extension`, called by
`collective_rpc`), and a forward pre-hook on the model's logits module, which is given exactly the final hidden states that
a step draws from, in the order of the rows that the logits processor sees. So prefix caching does no harm: the last token
of a prompt is always computed.

    hook: hidden_BH -> vLLM: logits_BV -> SeededDraw: tokens_B, logprobs_B, by the seed -> vLLM takes the argmax

Invariant: each drawn token is recorded under its request and position, with its logprob and its hidden state, or the
process ends with an error.
Left out: vLLM's second model runner, which has another interface (`client` turns it off).
Imported by vLLM in its own environment, in one process (docs/operate.md).
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
class ShoalArguments:
    """What `extra_args["shoal"]` says."""

    id: str
    seed: int
    first: int  # position of the request's first token within its completion: the ones before are in vLLM's prompt, too
    temperature: float


class Drawn(NamedTuple):
    """A token, its logprob, and the hidden state it was drawn from: bfloat16, on the CPU."""

    token: int
    logprob: float
    state_H: Tensor


@dataclass
class DrawRecord:
    """What was drawn. One for the process: vLLM makes the processor and the extension itself, and knows of no third."""

    hidden_BH: Tensor | None = None  # that the logits at hand were computed from
    # By request and position: a prompt's parts before the last draw, too, at the place where its first token comes.
    drawn: dict[str, dict[int, Drawn]] = field(default_factory=dict)
    count: int = 0  # of all tokens ever drawn

    def take_hidden(self, rows: int) -> Tensor:
        """The hidden states of the logits at hand, once. Raise RuntimeError if they are not of these rows."""
        hidden_BH, self.hidden_BH = self.hidden_BH, None
        if hidden_BH is None or len(hidden_BH) != rows:
            seen = "none" if hidden_BH is None else len(hidden_BH)
            raise RuntimeError(
                f"{rows} rows of logits, but {seen} of hidden states: this model has no usual logits module"
            )
        return hidden_BH


RECORD = DrawRecord()


class SeededDraw(LogitsProcessor):  # type: ignore[misc]
    """Chooses every token by Shoal's seeded Gumbel-max, and leaves vLLM no other choice.

    Requests say `temperature=0` to vLLM, and their own seed and temperature in `extra_args["shoal"]`.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.requests: dict[
            int, tuple[ShoalArguments, list[int]]
        ] = {}  # by row, with the tokens so far, which vLLM appends to

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if sampling_params.temperature != 0 or "shoal" not in (sampling_params.extra_args or {}):
            raise ValueError("each request has temperature 0 and extra_args['shoal'] (server.py)")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def new(
            params: SamplingParams, prompt: list[int] | None, output: list[int]
        ) -> tuple[ShoalArguments, list[int]]:
            return ShoalArguments(**params.extra_args["shoal"]), output

        process_dict_updates(self.requests, batch_update, new)

    def apply(self, logits: Tensor) -> Tensor:
        """Draw and record a token for each row. logits [B, V]: a drawn token's becomes infinite."""
        requests = [self.requests[row] for row in range(len(logits))]
        hidden_BH = RECORD.take_hidden(len(logits)).to("cpu", torch.bfloat16)
        for temperature in {one.temperature for one, _ in requests}:
            rows = [row for row, (one, _) in enumerate(requests) if one.temperature == temperature]
            alike = [requests[row] for row in rows]
            positions = [one.first + len(output) for one, output in alike]
            logits_NV = logits if len(rows) == len(logits) else logits[rows]
            tokens_N, logprobs_N = choose(logits_NV, [one.seed for one, _ in alike], positions, temperature)
            logits[rows, tokens_N] = torch.inf
            drawn = zip(rows, alike, positions, tokens_N.tolist(), logprobs_N.tolist(), strict=True)
            for row, (one, _), at, token, logprob in drawn:
                RECORD.drawn.setdefault(one.id, {})[at] = Drawn(token, logprob, hidden_BH[row].clone())
        RECORD.count += len(logits)
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
        """All that a finished request drew, in order; tensors: hidden [T, H], logprobs [T]. Forgets it."""
        drawn = [one for _, one in sorted(RECORD.drawn.pop(id).items())]
        logprobs = torch.tensor([one.logprob for one in drawn], dtype=torch.float32)
        return [one.token for one in drawn], {
            "hidden": torch.stack([one.state_H for one in drawn]),
            "logprobs": logprobs,
        }

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

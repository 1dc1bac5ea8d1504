"""What runs inside vLLM: Shoal's seeded sampling, a record of what was drawn from what, and weights replaced in place.

vLLM is extended at three public points: `LogitsProcessor` (the draw), `worker_extension_cls` (`Extension`, called by
`collective_rpc`), and a forward pre-hook on the model's logits module, which is given exactly the final hidden states that
a step draws from, in the order of the rows that the logits processor sees. So prefix caching does no harm: the last token
of a prompt is always computed.

    hook: hidden_BH -> vLLM: logits_BV -> SeededDraw: tokens_B, logprobs_B, by the seed -> vLLM takes the argmax

vLLM has two model runners with a `LogitsProcessor` of their own. The first one's is here, the second one's in
`second_runner`, where vLLM may also draw by itself.
Invariant: each drawn token's hidden state is recorded under its request and position, with the token and its logprob unless
vLLM drew it, or the process ends with an error.
Imported by vLLM in its own environment, in one process (docs/vllm.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from shoal.model.sampling import NOISES, NoiseName, choose


@dataclass(frozen=True)
class ShoalArguments:
    """What `extra_args["shoal"]` says."""

    id: str
    seed: int
    prompt: int  # tokens of the completion's prompt
    first: int  # position of the request's first token within its completion: the ones before are in vLLM's prompt, too
    temperature: float
    noise: NoiseName
    native: bool  # vLLM draws by itself, of the same noise


Row = tuple[int, ShoalArguments, int]  # of the logits; whose; position of the token within its completion


@dataclass
class Record:
    """What was drawn. One for the process: vLLM makes the processor and the extension itself, and knows of no third."""

    hidden_BH: Tensor | None = None  # that the logits at hand were computed from
    states: dict[str, dict[int, Tensor]] = field(default_factory=dict)  # bfloat16, on the CPU; by request and position
    tokens: dict[str, dict[int, tuple[int, float]]] = field(default_factory=dict)  # with logprobs; those drawn here
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

    def draw_(self, logits: Tensor, rows: Sequence[Row]) -> None:
        """Record the rows' states; draw their tokens, unless vLLM does. logits [B, V]: a drawn token's becomes infinite."""
        hidden_BH = self.take_hidden(len(logits)).to("cpu", torch.bfloat16)
        alike: dict[tuple[float, NoiseName], list[Row]] = {}
        for row, request, at in rows:
            self.states.setdefault(request.id, {})[at] = hidden_BH[row].clone()
            if not request.native:
                alike.setdefault((request.temperature, request.noise), []).append((row, request, at))
        for (temperature, name), some in alike.items():
            noise, places = NOISES[name], [row for row, _, _ in some]
            logits_NV = logits if places == list(range(len(logits))) else logits[places]
            seeds = [request.seed for _, request, _ in some]
            positions = [noise.position(request.prompt, at) for _, request, at in some]
            tokens_N, logprobs_N = choose(logits_NV, seeds, positions, temperature, noise)
            logits[places, tokens_N] = torch.inf
            for (_, request, at), token, logprob in zip(some, tokens_N.tolist(), logprobs_N.tolist(), strict=True):
                self.tokens.setdefault(request.id, {})[at] = token, logprob
        self.count += len(rows)


RECORD = Record()


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
        requests = [self.requests[row] for row in range(len(logits))]
        RECORD.draw_(logits, [(row, one, one.first + len(output)) for row, (one, output) in enumerate(requests)])
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
        """All that a finished request drew, in order. Forgets it.

        Tensors: hidden [T, H]; and, unless vLLM drew the tokens, logprobs [T]. The tokens are [] if it did.
        """
        states, drawn = RECORD.states.pop(id), RECORD.tokens.pop(id, {})
        tensors = {"hidden": torch.stack([states[at] for at in sorted(states)])}
        if drawn:
            tensors["logprobs"] = torch.tensor([drawn[at][1] for at in sorted(drawn)], dtype=torch.float32)
        return [drawn[at][0] for at in sorted(drawn)], tensors

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

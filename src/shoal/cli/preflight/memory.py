"""Bytes that each role holds at its peak.

    learner     16 a parameter in bf16 (weights 2, gradient 2, fp32 master 4, AdamW's moments 8), 20 in fp32; 4 more if an
                update has several rows, for the sum of their gradients. A reference model adds 2 or 4. FSDP2 spreads them
                over several devices (in bf16: master 4, moments 8, gradient 4, which is that sum).
    gathered    on several devices, in the compute dtype: what is outside of the blocks, and three blocks, of which one is
                computed, one comes next and one is being copied; a block's gradient, in it and in float32 to be reduced; the
                head's gradient in float32
    activations a saved tensor's elements per token and layer: 4 hidden (the residual, twice normalised, attention's output),
                2 width (queries, heads' outputs), 2 kv_width, 3 intermediate (gate, up, their product). With recomputation:
                `hidden` of each layer, one layer's own, and the gradients of its three intermediates
    logits      2 x 128 MiB of float32 at a time, value and gradient (`model/logprobs`), or less where all are fewer
    worker      weights, keys and values of the completions decoded together, all as long as the longest and up to SPARE
                positions, float32 logits of one position
    validator   weights, one layer's activations, logits as above

Invariant: on a CPU a role also holds what a process with torch holds before any model, measured in runs of a 3M model
(`tiny-exact.json`); SHARED_BYTES of it is the same pages in all children of `shoal run`.
Left out: fragmentation, copies between devices, tasks; and what FSDP holds longer on an accelerator than on a CPU, about 6.5
bytes for each entry of the head (`learner_memory.json`).
"""

from dataclasses import dataclass

from shoal.cli.preflight.work import Sizes, Work, cache_bytes_per_token

MB = 10**6
BASE_BYTES = {  # of a process, without its model
    "coordinator": 325 * MB,
    "origin": 345 * MB,
    "relay": 330 * MB,
    "learner": 760 * MB,
    "worker": 520 * MB,
    "validator": 580 * MB,
    "evaluator": 430 * MB,
}
SHARED_BYTES = 320 * MB  # of these, in every child that `shoal run` forks
CONTEXT_BYTES = 500 * MB  # on an accelerator, in place of BASE_BYTES: an assumption
LOGITS_BYTES = 2 * (128 << 20)
MASTER_BYTES = 12  # fp32 master and two moments
SPARE = 128  # positions by which the engine's buffers grow (`engine/rows`)
SUM_BYTES = 4  # fp32 sum of the gradients of several rows


@dataclass(frozen=True)
class Memory:
    """Bytes of one process of each role; of the learner on each of its devices."""

    roles: dict[str, float]

    def together(self, counts: dict[str, int]) -> float:
        """What all processes of `shoal run` hold, shared pages counted once."""
        total = sum(self.roles[role] * count for role, count in counts.items())
        return total - (sum(counts.values()) - 1) * SHARED_BYTES


def memory_of(sizes: Sizes, work: Work, compute_bytes: int, *, devices: int = 1, cpu: bool = True) -> Memory:
    base = BASE_BYTES if cpu else dict.fromkeys(BASE_BYTES, CONTEXT_BYTES)
    weights = compute_bytes * sizes.parameters
    logits = min(LOGITS_BYTES, 2 * 4 * sizes.vocab * work.row_tokens)
    checked = min(LOGITS_BYTES, 2 * 4 * sizes.vocab * work.validator_tokens)
    reference = weights if work.extra_forwards > int(work.recomputes) else 0
    trained = (2 * weights + MASTER_BYTES * sizes.parameters) / devices
    trained += SUM_BYTES * sizes.parameters if devices == 1 and work.rows > 1 else 0
    state = trained + reference / devices
    gathered = gathered_bytes(sizes, compute_bytes) if devices > 1 else 0.0
    cache = work.at_once * (work.prompt + work.longest + SPARE) * cache_bytes_per_token(sizes, compute_bytes)
    decoding = cache + 2 * 4 * work.at_once * sizes.vocab
    return Memory(
        {
            "coordinator": BASE_BYTES["coordinator"],
            "origin": BASE_BYTES["origin"],
            "relay": BASE_BYTES["relay"],
            "learner": base["learner"] + state + gathered + activation_bytes(sizes, work, compute_bytes) + logits,
            "worker": base["worker"] + weights + decoding,
            "validator": base["validator"]
            + weights
            + checked
            + layer_bytes(sizes, compute_bytes) * work.validator_tokens,
            "evaluator": base["evaluator"] + weights + decoding,
        }
    )


def gathered_bytes(sizes: Sizes, compute_bytes: int) -> float:
    """On each of several devices while a block is computed in the backward pass."""
    block = sizes.body / sizes.layers
    outside = sizes.parameters - sizes.body
    weights = compute_bytes * (outside + 3 * block)
    return weights + (compute_bytes + 4) * block + 4 * sizes.head


def layer_bytes(sizes: Sizes, compute_bytes: int) -> int:
    """What one layer saves of a token for the backward pass."""
    elements = 4 * sizes.hidden + 2 * sizes.width + 2 * sizes.kv_width + 3 * sizes.intermediate
    return elements * compute_bytes


def activation_bytes(sizes: Sizes, work: Work, compute_bytes: int) -> int:
    each = layer_bytes(sizes, compute_bytes)
    if work.recomputes:
        gradients = 3 * sizes.intermediate  # of gate, up and their product
        return work.row_tokens * (compute_bytes * (sizes.layers * sizes.hidden + gradients) + each)
    return work.row_tokens * sizes.layers * each

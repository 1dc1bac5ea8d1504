"""Count memory and traffic of each rank of a large learner, without a GPU, from the allocations of the real code.

    python -m benchmarks.speed.learner_memory

The models are Qwen2.5-7B and -32B (their sizes, no weights) on 8 and 64 ranks, in bf16, with AdamW, activation checkpointing
and no reference model. A row has 40,960 positions: 5 completions of 8,140 tokens behind a prompt of 260. Rank 0 runs
`Policy` as `shoal learner` does, over torch's fake process group and on fake tensors, which have shapes and no memory. It
loads, makes an update of two rows, computes another row, and gathers a version. Its device exists in name only (`Module`).

    peak      maximum bytes of all storages alive on the device, compared with `arithmetic`
    host      the same on the host. The result also has the largest slice of a tensor read at once, and the largest tensor
              that rank 0 gathers to publish
    traffic   bytes that the rank receives by collectives of weights and gradients for a row
    start     seconds to read the files, at DISK_BPS for a machine of eight ranks, and to gather them for the comparison with
              plain transformers, at LINK_BPS

Attention is computed as on a CPU ("cascade"). The flex attention of GPUs keeps less memory. The allocator's fragmentation
is not counted. Writes results/learner_memory.json and prints the table.
"""

import argparse
import sys
import tempfile
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import Qwen2Config

from benchmarks.common.machine import RESULTS, about, save
from shoal.cli.preflight.estimate import LOGITS_BYTES, MASTER_BYTES, Sizes, Work, activation_bytes, sizes_of
from shoal.config.recipe import LearnerSection, LossSection
from shoal.learner import masters
from shoal.learner import policy as policy_module
from shoal.learner.masters import collect
from shoal.learner.policy import Policy
from shoal.learner.ranks import Ranks
from shoal.model import attention, logprobs
from shoal.model.training import Sharded
from shoal.model.tree import Pack, Tree, pack

DEVICE = "pretend"
PATH = RESULTS / "learner_memory.json"
COMMON = {"vocab_size": 152064, "max_position_embeddings": 131072, "tie_word_embeddings": False}
MODELS = {
    "7B": COMMON
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "32B": COMMON
    | {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
}
RANKS = (8, 64)
PROMPT, COMPLETIONS, LENGTH = 260, 5, 8140  # a row's prompt tokens, completions, and tokens of each completion
DISK_BPS, LINK_BPS = 2e9, 50e9  # assumptions: one NVMe drive per machine, 400 Gb/s per GPU


class Module:
    """The module that PyTorch requires for a device. It uses the CPU's streams and has no random numbers."""

    Stream, Event = torch.cpu.Stream, torch.cpu.Event
    stream, current_stream = staticmethod(torch.cpu.stream), staticmethod(torch.cpu.current_stream)

    def is_available(self) -> bool:
        return False  # if it were True, a checkpoint would overlap its copies by using streams

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_rng_state(self, device: Any = 0) -> Tensor:
        return torch.empty(0)

    def set_rng_state(self, state: Tensor, device: Any = 0) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        pass


@cache
def register() -> None:
    """Register the device, once per process. It cannot be removed again."""
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=Module())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--out", type=Path, default=PATH)
    arguments = parser.parse_args()
    register()
    cases: list[dict[str, Any]] = []
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    result = about() | {"versions": versions, "cases": cases}
    for ranks in arguments.ranks:
        for name in arguments.models:
            cases.append(case(name, ranks))
            save(arguments.out, result)
    sys.stdout.write(table(cases) + "\n")


class Bytes(TorchDispatchMode):
    """Count bytes of the storages alive on device and host, now and at the peak, and bytes received by collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, tuple[str, int]] = {}
        self.now, self.peak = Counter[str](), Counter[str]()
        self.received = 0
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # this method is then called for the operations on the DTensor's parts
        figures = func(*args, **(kwargs or {}))
        if self.paused:
            return figures
        if func.namespace == "c10d":
            self.received += received(func, args)
        for leaf in tree_leaves((figures, args)):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self.see(leaf.untyped_storage(), leaf.device.type)
        return figures

    def see(self, storage: torch.UntypedStorage, where: str) -> None:
        if id(storage) not in self.sizes:
            self.sizes[id(storage)] = where, 0
            weakref.finalize(storage, self.gone, id(storage))
        self.sized(storage)

    def sized(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self.sizes:
            (where, before), size = self.sizes[id(storage)], storage.nbytes()
            self.now[where] += size - before
            self.sizes[id(storage)] = where, size
            self.peak[where] = max(self.peak[where], self.now[where])

    def gone(self, number: int) -> None:
        where, size = self.sizes.pop(number)
        self.now[where] -= size

    def phase(self) -> tuple[Counter[str], int]:
        """Return the peaks and the bytes received since the last call."""
        figures = self.peak, self.received
        self.peak, self.received = self.now.copy(), 0
        return figures

    @contextmanager
    def besides(self) -> Any:
        """Count what FSDP frees by resizing storages, and leave out DTensor's fake tensors, which take no memory."""
        resize, shapes = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            self.sized(storage)
            return done

        def unseen(*args: Any) -> Any:
            self.paused = True
            try:
                return shapes(*args)
            finally:
                self.paused = False

        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resized),
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen),
        ):
            yield


def received(func: Any, args: Any) -> int:
    """Return the bytes that a rank receives from others in this collective."""
    name = func.name().removeprefix("c10d::")
    if name not in ("_allgather_base_", "_reduce_scatter_base_"):
        return 0  # a collective of plain numbers
    output, sent = args[0], args[1]
    if name == "_allgather_base_":
        return nbytes(output) - nbytes(sent)
    return nbytes(sent) - nbytes(output)


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class FakeWeights:
    """A stand-in for files of bf16 tensors. It counts the bytes read."""

    def __init__(self) -> None:
        self.read_bytes = self.largest_bytes = 0

    @torch.no_grad()
    def fill_(self, model: Any) -> None:
        for tensor in model.state_dict().values():
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            figures = torch.empty(own.shape, dtype=torch.bfloat16)
            self.read_bytes += nbytes(figures)
            self.largest_bytes = max(self.largest_bytes, nbytes(figures))
            own.copy_(figures)


class Built(Sharded):
    """Build the skeleton before counting starts, because its constructor allocates memory that it never touches."""

    def build(self) -> None:
        model = super().skeleton()

        def skeleton() -> Any:
            for module in model.modules():  # FSDP would move buffers in a way that fake tensors do not support
                module._buffers = {name: of if of is None else there(of) for name, of in module._buffers.items()}
            return model

        object.__setattr__(self, "skeleton", skeleton)


def there(tensor: Tensor) -> Tensor:
    """Return a fake tensor on the device in place of a real one."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)


def row() -> Pack:
    """Return a row of tensors that are not fake. Compute what the CPU's attention derives from it."""
    packed = pack([Tree([1] * PROMPT, [[1] * LENGTH for _ in range(COMPLETIONS)])])
    _ = packed.layout.segments, packed.layout.restore_T, packed.layout.in_order, packed.layout.across
    return packed


def faked(packed: Pack) -> Pack:
    """Return the row on the device, with the CPU's attention."""
    layout, real = attention.RowLayout(packed.layout.spans, torch.device(DEVICE), "cascade"), packed.layout
    segments = [attention.Segments(there(of.index_BL), there(of.padded_BL11), of.start) for of in real.segments]
    layout.__dict__ |= {"segments": segments, "restore_T": there(real.restore_T)}
    layout.__dict__ |= {"in_order": real.in_order, "across": real.across}
    tensors = {name: there(of) for name, of in vars(packed).items() if isinstance(of, Tensor)}
    return replace(packed, layout=layout, **tensors)


def case(name: str, ranks: int) -> dict[str, Any]:
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    real = row()
    section = LearnerSection(activation_checkpointing=True, loss=LossSection(beta=0.0, entropy=0.0))
    counted, joined = Bytes(), Ranks(0, ranks)
    joined.__dict__["mesh"] = init_device_mesh(DEVICE, (ranks,))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = Qwen2Config(**MODELS[name], architectures=["Qwen2ForCausalLM"])
        config.save_pretrained(folder)
        weights: Any = FakeWeights()
        opened = Built(folder, torch.device(DEVICE), weights, "fast", logprobs.NOTHING)
        opened.build()
        with (
            mock.patch.object(masters, "open_sharded", return_value=opened),
            mock.patch.object(policy_module, "load_tokenizer", return_value=None),
            torch.autograd.set_multithreading_enabled(False),  # only this thread's operations are counted
            FakeTensorMode(allow_non_fake_inputs=True),
            counted,
            counted.besides(),
        ):
            policy, packed = Policy(folder, section, "bfloat16", DEVICE, 1.0, joined), faked(real)
            load_peak, _ = counted.phase()
            policy.logprobs(packed)[0].sum().backward()  # type: ignore[no-untyped-call]
            first_peak, row_received = counted.phase()
            collect(policy.weights, policy.masters)
            torch.nn.utils.clip_grad_norm_(policy.masters.values(), section.grad_clip)
            policy._update_masters()
            update_peak, _ = counted.phase()
            policy.logprobs(packed)[0].sum().backward()  # type: ignore[no-untyped-call]  # moments and gradients now exist
            row_peak, _ = counted.phase()
            policy.optimizer.zero_grad()
            resting = counted.now.copy()
            counted.phase()
            largest = 0
            for _, tensor in policy.published():
                largest = max(largest, nbytes(tensor))
            publish_peak, _ = counted.phase()
    sizes = sizes_of(config.to_dict())
    tokens = PROMPT + COMPLETIONS * LENGTH
    work = Work(PROMPT, LENGTH, reference=False, recomputes=True, row_tokens=tokens, rows=2, at_once=1)
    phases = {
        "load": load_peak,
        "first row": first_peak,
        "update": update_peak,
        "row": row_peak,
        "publish": publish_peak,
    }
    peaks = {where: {phase: peak[where] for phase, peak in phases.items()} for where in (DEVICE, "cpu")}
    version = 2 * sum(parameter.numel() for parameter in policy.model.parameters())
    dist.destroy_process_group()
    return {
        "model": name,
        "ranks": ranks,
        "parameters": version // 2,
        "arithmetic_bytes": round(arithmetic(sizes, work, ranks)),
        "peak_bytes": max(peaks[DEVICE].values()),
        "peaks": peaks[DEVICE],
        "resting_bytes": resting[DEVICE],
        "host_peak_bytes": max(peaks["cpu"].values()),
        "host_peaks": peaks["cpu"],
        "host_resting_bytes": resting["cpu"],
        "read_bytes": weights.read_bytes,
        "largest_slice_bytes": weights.largest_bytes,
        "largest_gathered_bytes": largest,
        "received_row_bytes": row_received,
        "version_bytes": version,
        "start_s": start_s(version, ranks),
    }


def arithmetic(sizes: Sizes, work: Work, ranks: int) -> float:
    """Return the estimated bytes of a learner in bf16 on each of its devices, without a reference model.

    state       as in `cli/preflight/estimate`: per parameter 4 bytes for the master, 8 for the moments and 4 for the
                gradient, which is summed over rows. FSDP2 spreads the state over the devices
    gathered    in bf16: the parameters outside the blocks, and those of three blocks (the one being computed, the next one,
                the one being copied). Also one block's gradient in bf16, the same in float32 to be reduced, and the head's
                gradient in float32
    """
    state = (4 + MASTER_BYTES) * sizes.parameters / ranks
    block, outside = sizes.body / sizes.layers, sizes.parameters - sizes.body
    gathered = 2 * (outside + 3 * block) + (2 + 4) * block + 4 * sizes.head
    logits = min(LOGITS_BYTES, 2 * 4 * sizes.vocab * work.row_tokens)
    return state + gathered + activation_bytes(sizes, work, 2) + logits


def start_s(version: int, ranks: int) -> dict[str, float]:
    """Return seconds to start. A machine's eight ranks read their part of the files twice; only the first needs the disk."""
    share = min(8, ranks) / ranks
    return {
        "read": round(version * share / DISK_BPS, 1),
        "read whole, as before": round(version / DISK_BPS, 1),
        "compare": round(3 * 2 * version * (ranks - 1) / ranks / LINK_BPS, 1),  # three forwards, in float32
    }


def table(cases: list[dict[str, Any]]) -> str:
    columns = ["model", "ranks", "counted peak", "arithmetic", "ratio", "host peak", "resting"]
    columns += ["loading", "publishing", "read", "row", "start"]
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for of in cases:
        cells = [of["model"], str(of["ranks"])]
        cells += [gb(of["peak_bytes"]), gb(of["arithmetic_bytes"]), f"{of['peak_bytes'] / of['arithmetic_bytes']:.2f}"]
        cells += [gb(of["host_peak_bytes"]), gb(of["resting_bytes"])]
        cells += [gb(of["peaks"]["load"]), gb(of["peaks"]["publish"])]
        cells += [gb(of["read_bytes"]), gb(of["received_row_bytes"])]
        start = of["start_s"]
        cells.append(f"{start['read'] + start['compare']:.0f} s ({start['read whole, as before']:.0f} s to read all)")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f}"


if __name__ == "__main__":
    main()

"""Load a causal language model from a Hugging Face folder, and save it. A published policy version is such a folder.

Invariants: weights are read from safetensors only. Only this file lets transformers read a folder (`from_pretrained`,
`from_config`): it never runs a model's code, asks to, or connects to another machine. Weights are written as one bf16
`model.safetensors`, tensor by tensor, which transformers loads too. (`training` reads only one rank's rows.)
"""

import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging as transformers_logging

from shoal.errors import ShoalError, first_line
from shoal.files import read_json
from shoal.model import adapters, attention, exact
from shoal.model.activations import use_exact_activations_
from shoal.model.dtype import DtypeName, release_memory
from shoal.model.numerics import Numerics
from shoal.model.products import use_exact_products_
from shoal.model.support import UnsupportedModelError, check_config, check_logprobs_, check_settings
from shoal.model.template import bound_

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # names the file of each tensor, if there are several files
T = TypeVar("T")

# While transformers builds a model, it replaces `tie_weights` of all models. If two threads do so at the same time, the
# replacement can stay, and then each model that the process loads later has an output head of random numbers. It also sets
# PyTorch's default dtype, so code that runs in other threads meanwhile must name the dtype of new tensors.
_building = threading.Lock()
MAX_LAYERS = 10_000
SPARE = 1 << 26  # numbers in buffers, which files need not hold
OPENED_FOR = 16  # tensors read before a file is reopened, because its mapped pages use memory until it is closed


def load_model(
    folder: Path,
    dtype: DtypeName = "float32",
    device: str = "cpu",
    numerics: Numerics = "fast",
    seed: int | None = None,
) -> Any:
    """Load the causal LM in `folder`, in eval mode. Return a transformers model (typed Any: transformers is untyped).

    `seed`: initialise random weights instead, the same for the same folder, seed and version of PyTorch.
    Raise UnsupportedModelError if weights are missing or damaged, or if the model's logprobs in packed rows differ from
    those of plain transformers.
    """
    config = load_config(folder)
    check_config(config, folder)
    model = _load(folder, config, dtype, device, numerics, seed)
    check_logprobs_(model, folder)
    release_memory()  # frees the memory of the comparison's copies
    return model


class OtherWeightsError(UnsupportedModelError, ValueError):
    """A version's weights are not those of the loaded model."""


class Root(nn.Module):
    """A model whose weights may be sharded. FSDP gathers them only while `forward` runs `compute`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[Any], T]) -> T:
        return compute(self.model)


def _load(folder: Path, config: Any, dtype: DtypeName, device: str, numerics: Numerics, seed: int | None) -> Any:
    if seed is None:
        check_size(config, check_weights(folder), folder)

    def build(name: str) -> Any:
        if seed is not None:
            torch.manual_seed(seed)
            return random_model(config, name).to(device, getattr(torch, dtype))
        with quiet(warnings=adapters.stored_in(config) is None):  # it would warn of adapters
            model, loaded = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                attn_implementation=name,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        if missing := sorted(loaded["missing_keys"]):
            raise UnsupportedModelError(
                f"{folder} lacks {len(missing)} of the model's weights, such as {missing[0]}, and transformers would draw "
                "them at random: copy or download the whole model again"
            )
        return model.to(device)

    with _explained(folder, "weights"):
        model = build_model(build, config, numerics)
        if adapters.stored_in(config) is not None:
            _load_adapters_(model, folder)
    return model


def check_size(config: Any, stored: int, folder: Path) -> None:
    """Raise UnsupportedModelError if the model would need far more memory than its files have parameters."""
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    if not isinstance(layers, int) or layers > MAX_LAYERS:
        raise UnsupportedModelError(f"{folder}: its config has {layers} layers; Shoal builds at most {MAX_LAYERS}")
    with _explained(folder, "config"), _building, torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = random_model(config, "eager")
    needed = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if needed > 2 * stored + SPARE:
        raise UnsupportedModelError(
            f"{folder}: its config describes {needed} parameters, but its files hold {stored}: copy it again"
        )


def random_model(config: Any, attention: str) -> Any:
    """Build a model with random float32 weights, with the attention that transformers knows by this name."""
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
    )


def generation_config(folder: Path) -> Any:
    """Return the settings in generation_config.json, or else those in config.json, as in transformers."""
    if (folder / "generation_config.json").exists():
        with _explained(folder, "generation settings"):
            return GenerationConfig.from_pretrained(folder, local_files_only=True)
    return GenerationConfig.from_model_config(load_config(folder))


def load_gguf(path: Path) -> tuple[Any, Any]:
    """Load the model and the tokenizer in a GGUF file of an installed package. The weights become float32."""
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    return AutoModelForCausalLM.from_pretrained(**source, trust_remote_code=False, dtype=torch.float32), tokenizer


def build_model(build: Callable[[str], Any], config: Any, numerics: Numerics) -> Any:
    """Build a model with Shoal's attention, its adapters and, if requested, exact layers. Return it in eval mode.

    `build` takes the name under which transformers finds the attention. Raise UnsupportedModelError if the model
    cannot use this attention.
    """
    name = {"exact": exact.NAME, "fast": attention.NAME}[numerics]
    AttentionInterface.register(name, exact.attend if numerics == "exact" else attention.attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans each new shape for 50 ms; a decoding step has a new one
    try:
        with _building:
            model = build(name).eval()
    except (KeyError, ValueError) as error:
        if name not in str(error):
            raise
        raise UnsupportedModelError(
            f"{config.model_type}: its attention cannot be replaced by Shoal's; choose another model (docs/recipe.md)"
        ) from error
    if numerics == "exact":
        use_exact_products_(model)
        use_exact_activations_(model)
    section = adapters.stored_in(config)
    if section is not None:
        adapters.attach_(model, section, exact=numerics == "exact")
    return model


@contextmanager
def quiet(*, warnings: bool = True) -> Iterator[None]:
    """Hide transformers' progress bars within the block. Without `warnings`, also hide its warnings."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    if not warnings:
        transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@torch.no_grad()
def _load_adapters_(model: Any, folder: Path) -> None:
    own = model.state_dict()
    for name, file in open_for_each(folder / WEIGHTS, list(filter(adapters.is_adapter, own))):
        own[name].copy_(file.get_tensor(name))


def check_weights(folder: Path) -> int:
    """Return the number of parameters in a model's safetensors files. Only their headers are read.

    Raise UnsupportedModelError if the folder has no such file, or if a file is damaged or missing; DamagedFileError if
    the index of several files is damaged; FileNotFoundError if the folder does not exist.
    """
    total, paths = 0, _weights_files(folder)
    if not paths:
        _check_folder(folder)
        raise UnsupportedModelError(f"{folder} has no weights; it needs files that end in .safetensors")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:  # compares the file's size with its header
                total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise UnsupportedModelError(f"{path} is damaged ({error}); copy or download it again") from error
        except FileNotFoundError as error:
            _check_folder(folder)
            raise UnsupportedModelError(f"{path} is missing; copy or download it again") from error
    return total


def _weights_files(folder: Path) -> list[Path]:
    """Return the safetensors files with the model's weights. Others, such as consolidated.safetensors, may repeat them."""
    if (folder / INDEX).exists():
        return sorted({folder / name for name in read_json(folder / INDEX)["weight_map"].values()})
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))


def weights_digest(folder: Path) -> str:
    """Return the BLAKE3 digest of the model's weights."""
    digest = blake3()
    for path in _weights_files(folder):
        digest.update_mmap(path)
    return digest.hexdigest()


def open_for_each(path: Path, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield each name with the open safetensors file. Reopen the file regularly to free the memory of pages read."""
    for start in range(0, len(names), OPENED_FOR):
        with safe_open(path, framework="pt") as file:
            yield from ((name, file) for name in names[start : start + OPENED_FOR])


def load_config(folder: Path) -> Any:
    """Load a model's config. Raise UnsupportedModelError, or FileNotFoundError if there is no folder."""
    return _read(folder, "config", AutoConfig)


def load_tokenizer(folder: Path) -> Any:
    """Load a model's tokenizer. Raise UnsupportedModelError, or FileNotFoundError if there is no folder."""
    return bound_(_read(folder, "tokenizer", AutoTokenizer))


def _check_folder(folder: Path) -> None:
    """Raise FileNotFoundError if the folder does not exist: a version may be removed while it is read."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist any more")


def _read(folder: Path, part: str, kind: Any) -> Any:
    check_settings(folder)
    with _explained(folder, part):
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@contextmanager
def _explained(folder: Path, part: str) -> Iterator[None]:
    """Raise UnsupportedModelError for any error of the model: a stranger's files can make transformers raise any."""
    try:
        yield
    except (ShoalError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the system, not of the model
        _check_folder(folder)
        asks = "trust_remote_code" in str(error)
        why = "it needs its own code, which Shoal never runs; choose another model" if asks else first_line(error)
        raise UnsupportedModelError(f"transformers cannot read the {part} in {folder}: {why}") from error


@torch.no_grad()
def load_weights_(model: Any, folder: Path) -> None:
    """Copy a published version's weights into `model`, in place. Only a few tensors are in memory twice."""
    own = model.state_dict()
    tied = tied_names(model)
    check_weights(folder)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        names = set(file.keys())
        missing, unknown = set(own) - names - tied, names - set(own)
        if missing or unknown:
            raise OtherWeightsError(f"{folder / WEIGHTS}: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}")
        for name in names:  # check all before the first copy, so that a refused file leaves the model unchanged
            shape = tuple(file.get_slice(name).get_shape())
            if shape != tuple(own[name].shape):
                raise OtherWeightsError(f"{folder / WEIGHTS}: {name} is {shape}, not {tuple(own[name].shape)}")
    for name, file in open_for_each(folder / WEIGHTS, sorted(names)):
        own[name].copy_(file.get_tensor(name))


def save_model(
    model: Any,
    tokenizer: Any,
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
) -> None:
    """Write `model` in bf16 with its config and tokenizer. `folder` must not exist yet.

    `tensors`, if given, replace the model's own weights. They must have the names, shapes and order of `shapes`
    (default: the model's `stored_shapes`), and may be on any device. Only one is in memory at a time. Raise ValueError,
    naming the first tensor that differs.
    The weights are written last, under a temporary name until they are complete. Raise OSError, naming the folder, if
    writing fails.
    """
    folder.mkdir(parents=True)
    with _naming(folder):
        config = model.config.to_dict() | {"dtype": "bfloat16", "architectures": [type(model).__name__]}
        type(model.config)(**config).save_pretrained(folder)
        # unlike `save_pretrained`, this also accepts the contradictory settings of some published models
        model.generation_config.to_json_file(folder / "generation_config.json")
        tokenizer.save_pretrained(folder)
        shapes = shapes or stored_shapes(model)
        if tensors is None:
            tensors = ((name, tensor) for name, tensor in model.state_dict().items() if name in shapes)
        temporary = folder / f".{WEIGHTS}.tmp"
        with temporary.open("wb") as file:
            file.write(_header(shapes))
            expected = iter(shapes.items())
            for name, tensor in tensors:
                if (wanted := next(expected, None)) != (name, tuple(tensor.shape)):
                    raise ValueError(f"{folder}: got tensor {name} {tuple(tensor.shape)} instead of {wanted}")
                file.write(tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().data)
            if wanted := next(expected, None):
                raise ValueError(f"{folder}: tensor {wanted} is missing")
        temporary.rename(folder / WEIGHTS)


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Turn a failed write by any library into an OSError that names the folder."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{folder} could not be written: {error.strerror}") from error
    except Exception as error:
        if type(error) is Exception:  # tokenizers raises nothing more specific
            raise OSError(f"{folder} could not be written: {error}") from error
        raise


def stored_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the weights in a published version, in file order."""
    tied = tied_names(model)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}


def _header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """Return the header of a safetensors file of bf16 tensors."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end_bytes = 0
    for name, shape in shapes.items():
        begin_bytes, end_bytes = end_bytes, end_bytes + 2 * prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin_bytes, end_bytes]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tied_names(model: Any) -> set[str]:
    """Return the names in the state dict whose tensor shares another's storage (an output head tied to the embedding)."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return set()
    return set(model._tied_weights_keys or ())


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids of end tokens that the folder's tokenizer and generation config declare.

    Without generation_config.json, they come from config.json, as in transformers.
    """
    declared = generation_config(folder).eos_token_id
    ids = declared if isinstance(declared, list) else [declared]
    if not all(i is None or type(i) is int for i in ids):
        raise UnsupportedModelError(
            f"{folder}: eos_token_id is not a list of token ids; correct generation_config.json"
        )
    return tuple(dict.fromkeys(i for i in [load_tokenizer(folder).eos_token_id, *ids] if i is not None))

"""Loading and saving models, replacing weights in place, and end tokens."""

import errno
import json
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from shoal.model.load import (
    INDEX,
    WEIGHTS,
    build_model,
    check_weights,
    eos_ids,
    load_model,
    load_tokenizer,
    load_weights_,
    save_model,
    stored_shapes,
    tied_names,
)
from shoal.model.support import UnsupportedModelError
from shoal.model.training import open_sharded

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(tiny_folder)


@pytest.fixture
def edited(tiny_folder: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Tensor]], object]], Path]:
    """Return a function that applies a change to the tensors of a weights file, and returns the new folder."""

    def edit(change: Callable[[dict[str, Tensor]], object]) -> Path:
        tensors = load_file(tiny_folder / WEIGHTS)
        change(tensors)
        save_file(tensors, tmp_path / WEIGHTS)
        return tmp_path

    return edit


def test_a_folder_without_some_of_the_weights_is_refused(
    tiny_folder: Path, edited: Callable[[Callable[[dict[str, Tensor]], object]], Path]
) -> None:
    folder = edited(lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    for path in tiny_folder.iterdir():
        if path.name != WEIGHTS:
            (folder / path.name).write_bytes(path.read_bytes())
    with pytest.raises(
        UnsupportedModelError, match=r"lacks 1 of the model's weights, such as model\.layers\.1\.mlp\.up"
    ):
        load_model(folder)


@pytest.mark.parametrize("size_bytes", [0, 5, 100, -1])
@pytest.mark.parametrize(
    "load", [load_model, lambda folder: open_sharded(folder, "cpu", "fast", lambda root, dtype: None)]
)
def test_a_file_of_weights_that_was_cut_off_is_named(
    tiny_folder: Path, tmp_path: Path, size_bytes: int, load: Callable[[Path], object]
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "cut"))
    (folder / WEIGHTS).write_bytes((tiny_folder / WEIGHTS).read_bytes()[:size_bytes])
    with pytest.raises(
        UnsupportedModelError, match=rf"^{folder / WEIGHTS} is damaged \(.*\); copy or download it again"
    ):
        load(folder)


@pytest.mark.parametrize("indexed", [True, False])
def test_weights_that_a_folder_repeats_in_another_file_count_once(
    tiny_folder: Path, tmp_path: Path, indexed: bool
) -> None:
    tensors = load_file(tiny_folder / WEIGHTS)
    parts = {"model-1.safetensors": sorted(tensors)[::2], "model-2.safetensors": sorted(tensors)[1::2]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    save_file(tensors, tmp_path / "consolidated.safetensors")
    if indexed:
        files = {name: file for file, names in parts.items() for name in names}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    assert check_weights(tmp_path) == sum(tensor.numel() for tensor in tensors.values())


def test_a_missing_file_of_several_is_named(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(UnsupportedModelError, match=r"model-1\.safetensors is missing; copy or download it again"):
        check_weights(tmp_path)


def test_a_folder_that_is_removed_while_it_is_loaded_is_a_missing_folder(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "version"))
    monkeypatch.setattr("shoal.model.load.check_config", lambda config, folder: shutil.rmtree(folder))
    with pytest.raises(FileNotFoundError, match="does not exist any more"):
        load_model(folder)


def test_two_threads_never_build_models_at_the_same_time(make_tiny: Any) -> None:
    """transformers replaces functions of its classes meanwhile, and would not restore them."""
    config, entered = make_tiny(0).config, list[str]()

    def build_second(_: str) -> Any:
        entered.append("second")
        return make_tiny(0)

    second = threading.Thread(target=build_model, args=(build_second, config, "fast"))

    def build_first(_: str) -> Any:
        second.start()
        second.join(0.5)
        entered.append("first")
        return make_tiny(0)

    build_model(build_first, config, "fast")
    second.join()
    assert entered == ["first", "second"]


@pytest.mark.parametrize("config", ["{}", '{"model_type": "no-such-model"}', "not JSON"])
@pytest.mark.parametrize(("load", "part"), [(load_model, "config"), (load_tokenizer, "tokenizer")])
def test_the_error_for_a_folder_that_transformers_cannot_read_names_it(
    tmp_path: Path, load: Any, part: str, config: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UnsupportedModelError, match=f"transformers cannot read the {part} in {tmp_path}: "):
        load(tmp_path)


def test_a_tokenizer_of_a_newer_version_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "newer"))
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"WordLevel"', '"NextLevel"'))
    with pytest.raises(UnsupportedModelError, match=f"transformers cannot read the tokenizer in {folder}: "):
        load_tokenizer(folder)


@pytest.mark.parametrize(("load", "reader"), [(load_model, AutoConfig), (load_tokenizer, AutoTokenizer)])
def test_an_error_of_the_operating_system_is_not_blamed_on_the_model(
    tmp_path: Path, load: Any, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(reader, "from_pretrained", fail)
    with pytest.raises(OSError, match="Too many open files"):
        load(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_saved_weights_are_rounded_to_bfloat16(make_tiny: Any, tokenizer: Any, tmp_path: Path, tied: bool) -> None:
    model = make_tiny(3, tie_word_embeddings=tied)
    save_model(model, tokenizer, tmp_path / "m")
    loaded = load_model(tmp_path / "m").state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], w.bfloat16().float()) for name, w in model.state_dict().items())


def test_a_copy_of_a_saved_copy_has_the_same_bytes(tiny_folder: Path, tmp_path: Path) -> None:
    """The first copy differs from the original, because transformers adds fields to tokenizer_config.json."""
    folders = [tiny_folder, tmp_path / "once", tmp_path / "twice"]
    for source, target in pairwise(folders):
        save_model(load_model(source), load_tokenizer(source), target)
    once, twice = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders[1:])
    assert once.keys() == twice.keys()
    assert [name for name in once if once[name] != twice[name]] == []


def test_a_generation_config_that_transformers_refuses_to_save_is_saved_with_new_end_tokens(
    make_tiny: Any, tokenizer: Any, tmp_path: Path
) -> None:
    model = make_tiny(0)
    model.generation_config.update(temperature=0.6, top_p=0.9, eos_token_id=[1, 3])  # without do_sample
    save_model(model, tokenizer, tmp_path / "m")
    saved = GenerationConfig.from_pretrained(tmp_path / "m")
    assert (saved.temperature, saved.top_p, saved.eos_token_id) == (0.6, 0.9, [1, 3])


def test_transformers_loads_a_saved_folder_with_tokenizer_and_template(tiny_folder: Path, tiny_model: Any) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    assert torch.equal(theirs(IDS).logits, tiny_model(IDS).logits)
    assert AutoModelForCausalLM.from_pretrained(tiny_folder, dtype="auto").dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    assert tokenizer.decode(tokenizer("what is 2+2?")["input_ids"]) == "what is 2+2?"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<user>hi<eos><assistant>"


def test_weights_are_stored_in_bfloat16_and_a_tied_output_head_once(
    make_tiny: Any, tiny_folder: Path, tiny_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    stored = load_file(tiny_folder / WEIGHTS)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert "model.embed_tokens.weight" in stored and "lm_head.weight" not in stored
    assert tiny_model.lm_head.weight.data_ptr() == tiny_model.model.embed_tokens.weight.data_ptr(), (
        "the loaded model's head must be tied"
    )
    untied = make_tiny(3, tie_word_embeddings=False)
    assert tied_names(untied) == set()
    save_model(untied, tokenizer, tmp_path / "m")
    assert "lm_head.weight" in load_file(tmp_path / "m" / WEIGHTS)
    with pytest.raises(FileExistsError):
        save_model(untied, tokenizer, tmp_path / "m")
    assert {p.dtype for p in untied.parameters()} == {torch.float32}, "saving changed the model's dtype"


@pytest.mark.parametrize("refused", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_failed_write_is_an_error_that_names_the_folder(
    make_tiny: Any, tokenizer: Any, tmp_path: Path, refused: str
) -> None:
    model = make_tiny(3, hidden_size=256)  # large enough that the weights are the longest file
    save_model(model, tokenizer, tmp_path / "whole")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "whole" / refused).stat().st_size - 1, limits[1]))
    try:
        with pytest.raises(OSError, match=f"{tmp_path / 'm'} could not be written: File too large"):
            save_model(model, tokenizer, tmp_path / "m")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "m" / WEIGHTS).exists()


def test_weights_are_written_last_tensor_by_tensor_and_renamed_when_complete(
    tiny_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """Only one tensor is in memory at a time: each is requested after the previous tensor is written."""
    folder, seen_bytes = tmp_path / "m", []
    shapes = stored_shapes(tiny_model)

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tiny_model.state_dict().items():
            if name in shapes:
                assert (folder / "config.json").exists() and (folder / "tokenizer.json").exists()
                assert not (folder / WEIGHTS).exists()
                seen_bytes.append((folder / f".{WEIGHTS}.tmp").stat().st_size)
                yield name, torch.zeros_like(tensor)

    save_model(tiny_model, tokenizer, folder, gathered())
    assert seen_bytes == sorted(seen_bytes) and seen_bytes[-1] > seen_bytes[0]
    stored = load_file(folder / WEIGHTS)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == shapes
    assert not any(tensor.any() for tensor in stored.values()), "the model's own tensors were stored"
    assert list(folder.glob(".*")) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda given: given[::-1], "instead of"),
        (lambda given: given[:-1], "is missing"),
        (lambda given: [*given, given[0]], "instead of None"),
        (lambda given: [(given[0][0], given[0][1].flatten()), *given[1:]], "instead of"),
    ],
)
def test_tensors_that_the_model_does_not_store_are_refused(
    tiny_model: Any, tokenizer: Any, tmp_path: Path, change: Any, problem: str
) -> None:
    given = [(name, torch.zeros(shape)) for name, shape in stored_shapes(tiny_model).items()]
    with pytest.raises(ValueError, match=problem):
        save_model(tiny_model, tokenizer, tmp_path / "m", change(given))
    assert not (tmp_path / "m" / WEIGHTS).exists()


def test_a_pickled_checkpoint_is_never_opened(make_tiny: Any, tmp_path: Path) -> None:
    model = make_tiny(3)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="has no weights; it needs files that end in .safetensors"):
        load_model(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replaced_weights_equal_freshly_loaded_ones_and_stay_in_place(
    tiny_folders: tuple[Path, Path], dtype: Any
) -> None:
    model = load_model(tiny_folders[0], dtype)
    assert not model.training and model.dtype == getattr(torch, dtype)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    load_weights_(model, tiny_folders[1])
    fresh = load_model(tiny_folders[1], dtype).state_dict()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in model.state_dict().items())
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"missing \['model.norm.weight'\]"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), r"unknown \['extra'\]"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(1)}),
            r"model.norm.weight is \(1,\), not \(192,\)",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_the_error_for_a_tensor_that_does_not_fit_names_it(
    tiny_folder: Path, edited: Any, change: Any, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        load_weights_(load_model(tiny_folder), edited(change))


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_refused_file_leaves_every_weight_as_it_was(tiny_folder: Path, edited: Any, name: str) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            tensor.zero_()
        tensors[name] = torch.zeros(1)

    model = load_model(tiny_folder)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=name):
        load_weights_(model, edited(spoil))
    assert [key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])] == []


@pytest.mark.parametrize(
    ("tokenizers", "declared", "expected"),
    [
        (2, None, (2,)),
        (2, 2, (2,)),
        (2, 3, (2, 3)),
        (2, [3, 2, 4], (2, 3, 4)),
        (None, [3], (3,)),
        (None, None, ()),
    ],
)
def test_end_tokens_come_from_the_tokenizer_and_then_the_generation_config(
    tokenizers: int | None, declared: Any, expected: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    GenerationConfig(eos_token_id=declared).save_pretrained(tmp_path)
    monkeypatch.setattr("shoal.model.load.load_tokenizer", lambda folder: SimpleNamespace(eos_token_id=tokenizers))
    assert eos_ids(tmp_path) == expected


def test_end_tokens_of_a_model_without_a_generation_config_are_those_of_its_saved_copy(
    make_tiny: Any, tokenizer: Any, tmp_path: Path
) -> None:
    save_model(make_tiny(0, eos_token_id=[1, 3]), tokenizer, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").unlink()
    save_model(load_model(tmp_path / "m"), tokenizer, tmp_path / "copy")
    assert eos_ids(tmp_path / "m") == eos_ids(tmp_path / "copy") == (1, 3)


def test_loading_shows_no_progress_bar_but_leaves_progress_bars_enabled(
    tiny_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    load_model(tiny_folder, "float32")
    assert "Loading" not in capfd.readouterr().err
    assert transformers_logging.is_progress_bar_enabled()
    if not shown:
        transformers_logging.disable_progress_bar()


def test_no_process_of_shoal_fetches_kernels_from_a_hub() -> None:
    """With the package `kernels`, transformers would download native code for some models, and run it."""
    code = "import shoal, transformers.integrations.hub_kernels as hub; print(hub._kernels_enabled)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

"""Deltas reproduce the new version bit for bit. Malformed deltas cause errors, or wrong files of the right sizes."""

import json
import random
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from shoal.shardcast import delta
from shoal.shardcast.delta import MAGIC, DeltaError, Kind, Link, apply, encode, passes
from shoal.shardcast.files import LayoutError, read_layout

from .support import contents

DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "U8": 1, "BOOL": 1, "F8_E4M3": 1}
TENSORS = {"a": ("BF16", (50, 7)), "b.weight": ("BF16", (64,)), "empty": ("BF16", (0, 3)), "scalar": ("F32", ())}


@contextmanager
def pieces_of(words: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "PIECE_WORDS", words)
        yield


def write_tensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], data: bytes) -> None:
    """Write a safetensors file of these dtypes and shapes. `data` fills the tensors in order."""
    entries, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + DTYPE_BYTES[dtype] * int(np.prod(shape, dtype=int))
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[:end].ljust(end, b"\0"))


def folder(path: Path, **files: bytes) -> Path:
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def sizes(path: Path) -> list[tuple[str, int]]:
    return [(name, len(data)) for name, data in sorted(contents(path).items())]


def write_delta(old: Path, new: Path, path: Path) -> None:
    with path.open("wb") as file:
        encode(old, new, [name for name, _ in sizes(new)], file.write)


def apply_one(old: Path, path: Path, out: Path, files: list[tuple[str, int]]) -> None:
    apply(old, [Link(path, tuple(files))], out)


def round_trip(old: Path, new: Path) -> bytes:
    """Encode, apply and compare. Return the delta."""
    where = new.parent
    write_delta(old, new, where / "delta")
    apply_one(old, where / "delta", where / "out", sizes(new))
    assert contents(where / "out") == contents(new)
    return (where / "delta").read_bytes()


@pytest.fixture
def versions(tmp_path) -> tuple[Path, Path]:
    """Write two small versions with every kind of file and piece. Some words of `a` change, the start of `b.weight`
    becomes zeros, and the scalar does not change."""
    words = np.random.default_rng(1).integers(0, 1 << 16, 350 + 64 + 2, dtype=np.uint16)
    others = words.copy()
    others[:350:18] += 1
    others[[8, 200, 349]] -= 3
    others[350:400] = 0
    write_tensors(tmp_path / "old" / "model.safetensors", TENSORS, words.tobytes())
    write_tensors(tmp_path / "new" / "model.safetensors", TENSORS, others.tobytes())
    for name, texts in {"config.json": (b"{}", b"{}"), "tokenizer.json": (b"[]" * 9, b"[1]" * 9)}.items():
        (tmp_path / "old" / name).write_bytes(texts[0])
        (tmp_path / "new" / name).write_bytes(texts[1])
    return tmp_path / "old", tmp_path / "new"


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 9), max_size=3)), max_size=3),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.integers(1, 100),
    st.integers(0, 1 << 32),
)
def test_any_words_of_any_dtype_are_reproduced_bit_for_bit(shapes, share, piece_words, seed):
    noise = random.Random(seed)
    tensors = {str(index): (dtype, tuple(shape)) for index, (dtype, shape) in enumerate(shapes)}
    before = noise.randbytes(8 * 9**3)
    after = bytes(byte if noise.random() >= share else noise.randrange(256) for byte in before)
    with TemporaryDirectory() as name, pieces_of(piece_words):
        old, new = Path(name) / "old", Path(name) / "new"
        write_tensors(old / "model.safetensors", tensors, before)
        write_tensors(new / "model.safetensors", tensors, after)
        round_trip(old, new)


@pytest.mark.parametrize("piece_words", [1, 1000, 1 << 20])
@pytest.mark.parametrize(("numpy_dtype", "dtype"), [("<u2", torch.bfloat16), ("<u2", torch.float16)])
def test_steps_of_every_kind_from_all_16_bit_words_are_reproduced(tmp_path, piece_words, numpy_dtype, dtype):
    """The words are all 65536 of 16 bits, with both zeros, infinities and every NaN. The steps go up and down, cross
    zero and overflow."""
    words = np.arange(1 << 16, dtype=numpy_dtype)[:: 64 if piece_words == 1 else 1]
    steps = np.array([1, -1, 0x8000, 0x7FFF, 0, -300, 2, 0xFFFE], np.int64).astype(numpy_dtype)
    others = words + np.resize(steps, len(words))
    for name, values in {"old": words, "new": others}.items():
        (tmp_path / name).mkdir()
        tensor = torch.from_numpy(values.view(np.int16).copy()).view(dtype)
        save_file({"w": tensor, "none": tensor[:0], "one": tensor[0].clone()}, tmp_path / name / "model.safetensors")
    with pieces_of(piece_words):
        round_trip(tmp_path / "old", tmp_path / "new")


def test_a_few_small_steps_need_few_bytes(tmp_path):
    noise = np.random.default_rng(2)
    old_words = noise.normal(0, 0.02, 1 << 20).astype(np.float32).view(np.uint32) >> 16
    new_words = old_words + noise.choice([-1, 0, 1], len(old_words), p=[0.005, 0.99, 0.005]).astype(np.uint32)
    for name, words in {"old": old_words, "new": new_words}.items():
        write_tensors(tmp_path / name / "m.safetensors", {"w": ("BF16", words.shape)}, words.astype("<u2").tobytes())
    delta_bytes = len(round_trip(tmp_path / "old", tmp_path / "new"))
    # A delta needs at least the entropy of the positions and directions of the steps.
    entropy_bytes = int((old_words != new_words).sum()) * (np.log2(100 * np.e) + 1) / 8
    assert delta_bytes < 1.2 * entropy_bytes


def test_words_that_compress_better_than_their_steps_are_sent_whole(tmp_path):
    for name, data in {"old": random.Random(2).randbytes(1 << 14), "new": b""}.items():
        write_tensors(tmp_path / name / "m.safetensors", {"w": ("BF16", (1 << 13,))}, data)
    assert len(round_trip(tmp_path / "old", tmp_path / "new")) < 100


def test_a_delta_between_equal_folders_holds_no_words(versions):
    old, _ = versions
    delta_bytes = len(round_trip(old, old))
    # The delta holds the kinds of three files, the hash of the header, and the kinds of the three tensors with words.
    assert delta_bytes == len(MAGIC) + 3 + 32 + 3


def test_files_may_be_added_removed_renamed_and_resized(tmp_path, versions):
    old, new = versions
    (old / "gone.txt").write_bytes(b"gone")
    (new / "sub").mkdir()
    (new / "sub" / "added.json").write_bytes(b"added" * 100)
    (new / "empty").write_bytes(b"")
    (new / "tokenizer.json").write_bytes(b"longer" * 100)
    (new / "model.safetensors").rename(new / "renamed.safetensors")
    round_trip(old, new)


def test_a_whole_file_may_have_many_pieces(tmp_path):
    old = folder(tmp_path / "old", f=b"")
    new = folder(tmp_path / "new", f=b"abc" * 1000 + random.Random(3).randbytes(3000))
    with pieces_of(70):
        round_trip(old, new)


@pytest.mark.parametrize(("shape", "start"), [((51, 7), b""), ((50, 7), b"\xff")], ids=["other shape", "no header"])
def test_a_file_with_another_header_is_sent_whole(versions, shape, start):
    old, new = versions
    write_tensors(new / "model.safetensors", {**TENSORS, "a": ("BF16", shape)}, b"x" * 900)
    (new / "model.safetensors").write_bytes(start + (new / "model.safetensors").read_bytes())
    assert round_trip(old, new)[len(MAGIC) :][:3] == bytes([Kind.SAME, Kind.WHOLE, Kind.WHOLE])


def test_memory_does_not_grow_with_the_files(tmp_path, monkeypatch):
    noise = random.Random(4)
    data = noise.randbytes(1 << 20)
    for name in ("old", "new"):
        write_tensors(tmp_path / name / "m.safetensors", {"w": ("BF16", (1 << 19,))}, data)
        (tmp_path / name / "other").write_bytes(noise.randbytes(1 << 20))
        data = bytes(data[:1000]) + noise.randbytes(1 << 16) + data[1000 + (1 << 16) :]
    files = sizes(tmp_path / "new")
    monkeypatch.setattr(delta, "CHUNK_BYTES", 1 << 10)
    with pieces_of(1 << 10):
        tracemalloc.start()
        with (tmp_path / "delta").open("wb") as file:
            encode(tmp_path / "old", tmp_path / "new", [name for name, _ in files], file.write)
        apply_one(tmp_path / "old", tmp_path / "delta", tmp_path / "out", files)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < 1 << 19


@pytest.mark.parametrize(
    "harm, reason",
    [
        (lambda old: (old / "model.safetensors").unlink(), "made against another version: .*No such file"),
        (lambda old: (old / "config.json").write_bytes(b"{ }"), "made against another version: .*3 bytes, expected 2"),
        (lambda old: (old / "model.safetensors").write_bytes(b"x" * 900), "made against another version: .*900 bytes"),
        (
            lambda old: write_tensors(
                old / "model.safetensors", {"A": TENSORS["a"], **dict([*TENSORS.items()][1:])}, b""
            ),
            "the header of .* differs",
        ),
    ],
)
def test_a_delta_is_not_applied_to_another_old_version(tmp_path, versions, harm, reason):
    old, new = versions
    write_delta(old, new, tmp_path / "delta")
    harm(old)
    with pytest.raises(DeltaError, match=reason):
        apply_one(old, tmp_path / "delta", tmp_path / "out", sizes(new))


def apply_garbage(old: Path, garbage: bytes, files: list[tuple[str, int]], out: Path) -> None:
    """Apply garbage. Check that this raises DeltaError or writes files of the right sizes."""
    out.with_name("garbage").write_bytes(garbage)
    try:
        apply_one(old, out.with_name("garbage"), out, files)
    except DeltaError as error:
        assert str(error)
    else:
        assert sizes(out) == files
    assert all(size_bytes <= dict(files)[name] for name, size_bytes in sizes(out))


def test_a_delta_truncated_anywhere_is_refused(tmp_path, versions):
    old, new = versions
    with pieces_of(200):
        write_delta(old, new, tmp_path / "delta")
        data = (tmp_path / "delta").read_bytes()
        for size_bytes in (*range(0, len(data), 3), len(data) - 1):
            (tmp_path / "delta").write_bytes(data[:size_bytes])
            with pytest.raises(DeltaError, match="truncated"):
                apply_one(old, tmp_path / "delta", tmp_path / "out", sizes(new))
        (tmp_path / "delta").write_bytes(data + b"\0")
        with pytest.raises(DeltaError, match="extra bytes after its last file"):
            apply_one(old, tmp_path / "delta", tmp_path / "out", sizes(new))


def test_a_flipped_bit_causes_an_error_or_files_of_the_right_sizes(tmp_path, versions):
    old, new = versions
    with pieces_of(200):
        write_delta(old, new, tmp_path / "delta")
        data = (tmp_path / "delta").read_bytes()
        for bit in range(0, 8 * len(data), 11):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            apply_garbage(old, bytes(flipped), sizes(new), tmp_path / "out")


@settings(deadline=None)
@given(st.binary(max_size=300) | st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 4, 255]), max_size=300).map(bytes))
def test_random_bytes_cause_an_error_or_files_of_the_right_sizes(garbage):
    with TemporaryDirectory() as name, pieces_of(200):
        old = Path(name) / "old"
        write_tensors(old / "model.safetensors", TENSORS, bytes(900))
        (old / "config.json").write_bytes(b"{}")
        header = blake3(read_layout(old / "model.safetensors").header).digest()
        for start in (b"", MAGIC, MAGIC + bytes([Kind.SAME, Kind.TENSORS]) + header):
            apply_garbage(old, start + garbage, sizes(old), Path(name) / "out")


def frame(data: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


CLAIMS_MUCH = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 60) + b"\x01\x00\x00"


@pytest.mark.parametrize(
    "plane, reason",
    [
        (frame(b"a" * 101), "zstd frame does not have"),
        (frame(b"a" * 100_000), "zstd frame does not have"),
        (frame(b"a" * 100, write_content_size=False), "zstd frame does not have"),
        (CLAIMS_MUCH, "zstd frame does not have"),
        (frame(b"a" * 50) + frame(b"a" * 50), "zstd frame does not have"),
        (frame(b"a" * 100) + b"more", "not a zstd frame"),
        (frame(b"a" * 100)[:-1], "not a zstd frame"),
        (frame(b"a" * 100).replace(b"a", b"b" * 20), "not a zstd frame"),
        (b"no frame", "not a zstd frame"),
        (b"x" * 101, "a plane of 100 bytes takes 101"),
    ],
)
def test_a_malformed_plane_or_one_of_another_size_is_refused(tmp_path, plane, reason):
    (tmp_path / "delta").write_bytes(MAGIC + bytes([Kind.WHOLE]) + struct.pack("<I", len(plane)) + plane)
    with pytest.raises(DeltaError, match=reason):
        apply_one(tmp_path, tmp_path / "delta", tmp_path / "out", [("f", 100)])


CHANGES = bytes([Kind.CHANGES])


@pytest.mark.parametrize(
    "body, reason",
    [
        (CHANGES + struct.pack("<I", 351), "351 changes in 350 words"),
        (CHANGES + struct.pack("<I", 2**32 - 1), "4294967295 changes in 350 words"),
        (CHANGES + struct.pack("<IIBIBII", 1, 1, 350 % 256, 1, 1, 0, 0), "a change at word 350 of 350"),
        (CHANGES + struct.pack("<I", 1) + struct.pack("<IB", 1, 255) * 4, "a change at word 4294967295 of 350"),
        (CHANGES + struct.pack("<I", 0), "0 changes in 350 words"),
        (bytes([Kind.TENSORS]), "kind 2, expected one of 0 .SAME., 1 .WHOLE., 3 .CHANGES."),
    ],
)
def test_impossible_changes_of_a_piece_are_refused(tmp_path, versions, body, reason):
    old, _ = versions
    path = old / "model.safetensors"
    start = MAGIC + bytes([Kind.TENSORS]) + blake3(read_layout(path).header).digest()
    (tmp_path / "delta").write_bytes(start + body)
    with pytest.raises(DeltaError, match=reason):
        apply_one(old, tmp_path / "delta", tmp_path / "out", [(path.name, path.stat().st_size)])


@pytest.mark.parametrize(
    "data", [b"", b"1234567", b"\xff" * 9, struct.pack("<Q", 5) + b"[" * 5, struct.pack("<Q", 100_000) + b"[" * 100_000]
)
def test_a_file_that_is_not_safetensors_has_no_layout(tmp_path, data):
    (tmp_path / "m").write_bytes(data)
    with pytest.raises(LayoutError):
        read_layout(tmp_path / "m")


ONE = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "entries",
    [
        [],
        {"a": 1},
        {"a": {**ONE, "dtype": 2}},
        {"a": {**ONE, "data_offsets": [0, 3]}},
        {"a": {**ONE, "data_offsets": [0, 2]}},
        {"a": {**ONE, "data_offsets": [2, 4]}},
        {"a": {**ONE, "data_offsets": [4, 0]}},
        {"a": {**ONE, "data_offsets": [0, 4, 4]}},
        {"a": {**ONE, "data_offsets": [0, 4.0]}},
        {"a": ONE, "b": ONE},
        {"a": ONE, "b": {**ONE, "data_offsets": [4, 8]}},
        {"a": {"dtype": "BF16"}},
    ],
)
def test_a_header_that_is_malformed_or_does_not_fit_its_file_has_no_layout(tmp_path, entries):
    header = json.dumps(entries).encode()
    (tmp_path / "m").write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    with pytest.raises(LayoutError):
        read_layout(tmp_path / "m")


def test_read_layout_reads_what_the_safetensors_library_writes(tmp_path):
    saved = {"x": torch.ones(2, 3), "y": torch.ones(4, dtype=torch.bfloat16), "z": torch.tensor(7)}
    save_file(saved, tmp_path / "m", metadata={"format": "pt"})
    tensors = {tensor.name: tensor for tensor in read_layout(tmp_path / "m").tensors}
    assert {name: (tensor.words, tensor.word_bytes) for name, tensor in tensors.items()} == {
        "x": (6, 4),
        "y": (4, 2),
        "z": (8, 1),
    }
    data = (tmp_path / "m").read_bytes()
    assert data[tensors["z"].offset_bytes : tensors["z"].end_bytes] == struct.pack("<q", 7)


# Chains


def write_chain(tmp_path: Path, *folders: Path) -> list[Link]:
    links = []
    for old, new in pairwise(folders):
        links.append(Link(tmp_path / f"{old.name}-{new.name}", tuple(sizes(new))))
        write_delta(old, new, links[-1].delta)
    return links


def chain_of(tmp_path: Path, versions: int) -> list[Path]:
    """Write versions of two files. Some words of the tensors change in each version, all words of one tensor change in
    version 2, and config.json changes in odd versions."""
    words = np.random.default_rng(3).integers(0, 1 << 16, 350 + 64 + 2, dtype=np.uint16)
    made = []
    for version in range(versions):
        words[version : 350 : 7 + version] += version
        if version == 2:
            words[350:414] = np.random.default_rng(4).integers(0, 1 << 16, 64, dtype=np.uint16)
        made.append(tmp_path / f"v{version}")
        write_tensors(made[-1] / "model.safetensors", TENSORS, words.tobytes())
        (made[-1] / "config.json").write_bytes(b"%d" % ((version + 1) // 2))
    return made


@pytest.mark.parametrize("piece_words", [10, 1 << 20])
def test_a_chain_of_deltas_is_applied_in_one_pass(tmp_path, piece_words):
    with pieces_of(piece_words):
        folders = chain_of(tmp_path, 5)
        (run,) = passes(write_chain(tmp_path, *folders))
        assert len(run) == 4
        written = bytearray()
        apply(folders[0], run, tmp_path / "out", written.extend)
    assert contents(tmp_path / "out") == contents(folders[-1])
    assert written == b"".join(data for _, data in sorted(contents(folders[-1]).items()))


@pytest.mark.parametrize("broken", ["first", "middle", "last"])
def test_a_chain_with_a_malformed_delta_is_refused(tmp_path, broken):
    folders = chain_of(tmp_path, 4)
    run = write_chain(tmp_path, *folders)
    path = run[["first", "middle", "last"].index(broken)].delta
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DeltaError):
        apply(folders[0], run, tmp_path / "out")


def test_a_chain_is_split_where_one_pass_cannot_continue(tmp_path):
    """Version 2 adds a file. Version 4 renames a tensor, in a file of the same size."""
    folders = chain_of(tmp_path, 6)
    for folder in folders[2:]:
        (folder / "more.json").write_bytes(b"{}")
    for folder in folders[4:]:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes().replace(b"b.weight", b"c.weight"))
    links = write_chain(tmp_path, *folders)
    runs = passes(links)
    assert [len(run) for run in runs] == [1, 2, 1, 1]
    made = folders[0]
    for place, run in enumerate(runs):
        apply(made, run, tmp_path / f"out{place}")
        made = tmp_path / f"out{place}"
    assert contents(made) == contents(folders[-1])


def test_encode_passes_every_byte_of_the_new_files_to_on_read_in_order(versions, tmp_path):
    passed = bytearray()
    names = [name for name, _ in sizes(versions[1])]
    encode(*versions, names, lambda data: None, passed.extend)
    assert passed == b"".join((versions[1] / name).read_bytes() for name in names)

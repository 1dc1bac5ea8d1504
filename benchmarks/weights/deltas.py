"""Measure the size and cost of deltas between versions of real training, compared with other encodings.

    python -m benchmarks.weights.deltas --versions 3e-7=runs/a/learner/versions --versions 2e-5=runs/b/learner/versions

Each folder holds v000000, v000001, .... At most --most consecutive pairs per label, evenly spaced, are measured on one
thread with both versions in the page cache. Writes every pair and the medians to benchmarks/results/deltas.json after each
label. Times are wall-clock seconds and CPU seconds. Other load changes only the wall-clock seconds.

    files     shoal.shardcast.delta as a node uses it: make a delta from two folders, apply it to the old folder
    links     time to encode, transfer and apply the delta, compared with the time to transfer the full version (bf16
              weights and a tokenizer)
    a model   time to update a bf16 model from the new folder, as engines do, or in place from the decoded delta
    ways      other encodings, for every fourth pair, in memory, on the pieces that shoal.shardcast.delta uses; their order
              rotates from pair to pair

Every encoding must reproduce the new words. Each compresses every byte plane separately with zstd, or stores the plane as
it is if that is smaller.

    shoal                  Shoal's encoding: gaps, difference, zstd 1
    xor                    xor of all words of both versions
    bitmask, difference    one bit per word; for changed words, new minus old as integers
    gaps, xor              the number of unchanged words before each changed one; xor of changed words
    gaps, difference       differences of the words as integers (mostly +1 and -1, in zigzag)
    gaps, ordered          the same differences of integers that sort like the numbers that the words encode, so that a
                           change of sign is a small difference too
    grouped, difference    as gaps, difference, but words are first grouped by exponent, which the reader can repeat. Words
                           with small exponents change often, because an update moves all words about equally far.
                           `pays_below_mb_s` is the link speed at which the saved bytes make up for the CPU seconds
"""

import argparse
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import zstandard

from benchmarks.common.machine import RESULTS, about, save
from shoal.model.load import load_model, load_weights_
from shoal.shardcast import delta
from shoal.shardcast.delta import MAGIC, PIECE_WORDS, Kind, Link, Reader, Writer
from shoal.shardcast.files import StoredTensor, read_layout

LINKS_BITS_S = {"1 Gb/s": 1e9, "100 Mb/s": 1e8}
WAYS_EVERY = 4  # other encodings are measured for every fourth pair
Files = list[tuple[str, int]]
Pairs = list[tuple[Any, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description="size and cost of deltas between versions")
    parser.add_argument("--versions", action="append", required=True, metavar="LABEL=DIR")
    parser.add_argument("--most", type=int, default=20, help="pairs per label")
    arguments = parser.parse_args()
    labels = {label: Path(folder) for label, folder in (option.split("=", 1) for option in arguments.versions)}

    figures: dict[str, Any] = about() | {"versions": {}}
    torch.set_num_threads(1)
    path = RESULTS / "deltas.json"
    for label, folder in labels.items():
        chosen = pairs_in(folder, arguments.most)
        model = load_model(chosen[0][0], "bfloat16")
        pairs = [measure(*pair, model, turn) for turn, pair in enumerate(chosen)]
        figures["versions"][label] = {"medians": medians(pairs), "pairs": pairs}
        show(label, figures["versions"][label]["medians"])
        save(path, figures)


def pairs_in(folder: Path, most: int) -> list[tuple[Path, Path]]:
    versions = {int(path.name[1:]): path for path in sorted(folder.glob("v*"))}
    pairs = [(path, versions[number + 1]) for number, path in versions.items() if number + 1 in versions]
    if not pairs:
        sys.exit(f"{folder} has no two consecutive versions")
    return [pairs[index] for index in np.unique(np.linspace(0, len(pairs) - 1, most).round().astype(int))]


def measure(old: Path, new: Path, model: Any, turn: int) -> dict[str, Any]:
    files = [(str(path.relative_to(new)), path.stat().st_size) for path in sorted(new.rglob("*")) if path.is_file()]
    for path, _ in files:  # fill the page cache, as on a node that has just written the files
        (old / path).read_bytes()
        (new / path).read_bytes()
    with tempfile.TemporaryDirectory() as name:
        row = measure_files(old, new, files, Path(name))
        row["a model"] = measure_model(old, new, files, Path(name) / "delta", model)
    if turn % WAYS_EVERY == 0:
        row |= measure_ways(old, new, turn // WAYS_EVERY)
    return row


def measure_files(old: Path, new: Path, files: Files, folder: Path) -> dict[str, Any]:
    with (folder / "delta").open("wb") as file:
        _, encode_s = timed(delta.encode, old, new, [path for path, _ in files], file.write)
    _, apply_s = timed(delta.apply, old, [Link(folder / "delta", tuple(files))], folder / "out")
    if any((folder / "out" / path).read_bytes() != (new / path).read_bytes() for path, _ in files):
        sys.exit(f"shoal does not reproduce {new}")
    changed = [(len(after), np.count_nonzero(before != after)) for before, after in load_pieces(old, new)]
    return {
        "from": old.name,
        "to": new.name,
        "words": sum(words for words, _ in changed),
        "changed_words": sum(int(count) for _, count in changed),
        "whole_bytes": sum(size for _, size in files),
        "files": {"bytes": (folder / "delta").stat().st_size, "encode_s": encode_s, "apply_s": apply_s},
    }


def measure_model(old: Path, new: Path, files: Files, packed: Path, model: Any) -> dict[str, Any]:
    own = model.state_dict()
    load_weights_(model, old)
    changes, decode_s = timed(decode_changes, new, files, packed)
    _, write_s = timed(write_changes_, own, changes)
    in_place = {name: tensor.clone() for name, tensor in own.items()}
    load_weights_(model, old)
    _, load_s = timed(load_weights_, model, new)
    if not all(torch.equal(tensor.view(torch.int16), own[name].view(torch.int16)) for name, tensor in in_place.items()):
        sys.exit(f"changes in place do not reproduce {new}")
    return {"load_s": load_s, "decode_changes_s": decode_s, "write_changes_s": write_s}


def decode_changes(new: Path, files: Files, packed: Path) -> list[tuple[str, int, Any, Any]]:
    """Return (tensor, first word, places or None for all, differences or all words) for every changed piece."""
    changes: list[tuple[str, int, Any, Any]] = []
    with packed.open("rb") as file:
        reader = Reader(file, len(files))
        for (path, _), file_kind in zip(files, reader.file_kinds, strict=True):
            if file_kind is not Kind.TENSORS:
                continue
            reader.take(32)  # skip the header's hash, which `apply` compares
            for tensor, start, count in pieces_of(new / path):
                kind = reader.piece_kind()
                if kind is Kind.CHANGES:
                    changes.append((tensor.name, start, *reader.changes(count, tensor.word_bytes)))
                elif kind is Kind.WHOLE:
                    changes.append((tensor.name, start, None, reader.words(count, tensor.word_bytes)))
    return changes


def write_changes_(own: dict[str, Any], changes: list[tuple[str, int, Any, Any]]) -> None:
    for name, start, places, words in changes:
        own_words = own[name].view(-1).view(torch.int16).numpy().view(np.uint16)[start:]
        if places is None:
            own_words[: len(words)] = words
        else:
            own_words[places] += words


def measure_ways(old: Path, new: Path, turn: int) -> dict[str, Any]:
    pieces = list(load_pieces(old, new))
    ways = list(WAYS.items())
    rows = {}
    for name, (encode, decode) in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
        packed, encode_s = timed(each, encode, pieces)
        unpacked, apply_s = timed(
            each, decode, [(one, before) for one, (before, _) in zip(packed, pieces, strict=True)]
        )
        if not all(np.array_equal(words, after) for words, (_, after) in zip(unpacked, pieces, strict=True)):
            sys.exit(f"{name} does not reproduce {new}")
        del unpacked
        rows[name] = {"bytes": sum(map(len, packed)), "encode_s": encode_s, "apply_s": apply_s}
    return {
        "one_unit_share": one_unit_share(pieces),
        "ways_of_bytes": sum(after.nbytes for _, after in pieces),
        "ways": {name: rows[name] for name in WAYS},
        "grouped_pays_below_mb_s": pays_below_mb_s(rows["shoal"], rows["grouped, difference, zstd 1"]),
    }


def pays_below_mb_s(quick: dict[str, Any], short: dict[str, Any]) -> float:
    cpu_s = sum(short[what]["cpu"] - quick[what]["cpu"] for what in ("encode_s", "apply_s"))
    return round(8e-6 * (quick["bytes"] - short["bytes"]) / cpu_s, 2)


def load_pieces(old: Path, new: Path) -> Iterator[tuple[Any, Any]]:
    for path in sorted(new.glob("*.safetensors")):
        if read_layout(old / path.name).header != read_layout(path).header:
            sys.exit(f"the header of {path} differs from that of the version before")
        for tensor, start, count in pieces_of(path):
            offset, dtype = tensor.offset_bytes + start * tensor.word_bytes, f"<u{tensor.word_bytes}"
            yield tuple(np.fromfile(f, dtype, count, offset=offset) for f in (old / path.name, path))


def pieces_of(path: Path) -> Iterator[tuple[StoredTensor, int, int]]:
    """Yield (tensor, first word, number of words) of each piece."""
    for tensor in read_layout(path).tensors:
        for start in range(0, tensor.words, PIECE_WORDS):
            yield tensor, start, min(PIECE_WORDS, tensor.words - start)


def each(run: Callable[[Any, Any], Any], pairs: Pairs) -> list[Any]:
    return [run(*pair) for pair in pairs]


def timed(run: Callable[..., Any], *arguments: Any) -> tuple[Any, dict[str, float]]:
    clock, cpu = time.perf_counter(), time.process_time()
    result = run(*arguments)
    return result, {"clock": round(time.perf_counter() - clock, 4), "cpu": round(time.process_time() - cpu, 4)}


def one_unit_share(pieces: Pairs) -> float:
    """Return the share of changed words that moved by one unit in the last place."""
    steps = np.concatenate([zigzag(after[at] - before[at]) for before, after, at in changed_in(pieces)])
    return float(np.isin(steps, (1, 2)).mean())


def changed_in(pieces: Pairs) -> Iterator[tuple[Any, Any, Any]]:
    return ((before, after, np.flatnonzero(before != after)) for before, after in pieces)


# --- Encodings: (old, new) to bytes, (bytes, old) to new ---


def pack(level: int, *arrays: Any) -> bytes:
    compressor = zstandard.ZstdCompressor(level=level)
    out = []
    for words in arrays:
        out.append(len(words).to_bytes(4, "little"))
        for plane in words.view(np.uint8).reshape(len(words), -1).T if len(words) else ():
            data = b"" if not plane.any() else min(plane.tobytes(), compressor.compress(plane.tobytes()), key=len)
            out += [len(data).to_bytes(4, "little"), data]
    return b"".join(out)


def unpack(packed: bytes, *dtypes: str) -> list[Any]:
    file, arrays = io.BytesIO(packed), []
    for dtype in dtypes:
        count = int.from_bytes(file.read(4), "little")
        planes = np.zeros((count, np.dtype(dtype).itemsize), np.uint8)
        for index in range(planes.shape[1] if count else 0):
            data = file.read(int.from_bytes(file.read(4), "little"))
            if data:
                data = data if len(data) == count else zstandard.decompress(data)
                planes[:, index] = np.frombuffer(data, np.uint8)
        arrays.append(planes.reshape(-1).view(dtype))
    return arrays


def encode_xor(level: int, old: Any, new: Any) -> bytes:
    return pack(level, old ^ new)


def decode_xor(packed: bytes, old: Any) -> Any:
    return old ^ unpack(packed, old.dtype)[0]


def encode_bitmask(level: int, old: Any, new: Any) -> bytes:
    is_changed = old != new
    return pack(level, np.packbits(is_changed), zigzag((new - old)[is_changed]))


def decode_bitmask(packed: bytes, old: Any) -> Any:
    bits, steps = unpack(packed, "u1", old.dtype)
    new = old.copy()
    new[np.flatnonzero(np.unpackbits(bits, count=len(old)))] += unzigzag(steps)
    return new


def encode_gaps(level: int, step: Callable[[Any, Any], Any], old: Any, new: Any) -> bytes:
    places = np.flatnonzero(old != new)
    return pack(level, gaps(places), step(old[places], new[places]))


def decode_gaps(unstep: Callable[[Any, Any], Any], packed: bytes, old: Any) -> Any:
    figures, steps = unpack(packed, "<u4", old.dtype)
    places, new = ungaps(figures), old.copy()
    new[places] = unstep(old[places], steps)
    return new


def encode_grouped(old: Any, new: Any) -> bytes:
    exponents, places = exponents_of(old), np.flatnonzero(old != new)
    limit = choose_limit(exponents, exponents[places])
    small = small_places(exponents, limit)
    ranks, others = np.flatnonzero(old[small] != new[small]), places[exponents[places] >= limit]
    places = np.concatenate([small[ranks], others])
    return bytes([limit]) + pack(1, gaps(ranks), gaps(others), zigzag(new[places] - old[places]))


def decode_grouped(packed: bytes, old: Any) -> Any:
    ranks, others, steps = unpack(packed[1:], "<u4", "<u4", old.dtype)
    small = small_places(exponents_of(old), packed[0])
    new = old.copy()
    new[np.concatenate([small[ungaps(ranks)], ungaps(others)])] += unzigzag(steps)
    return new


def choose_limit(exponents: Any, changed: Any) -> int:
    """Return the highest limit for which two things hold: at least an eighth of the words with smaller exponents change,
    and at most an eighth of all words have smaller exponents."""
    words_C = np.cumsum(np.bincount(exponents[::16], minlength=256)) * 16
    changed_C = np.cumsum(np.bincount(changed, minlength=256))
    worthwhile_C = (8 * changed_C >= words_C) & (8 * words_C <= len(exponents))
    return min(int(np.flatnonzero(worthwhile_C).max(initial=-1)) + 1, 255)


def small_places(exponents: Any, limit: int) -> Any:
    places = np.flatnonzero(exponents < limit)
    return places[np.argsort(exponents[places], kind="stable")]


def exponents_of(words: Any) -> Any:
    return (words << 1).view(np.uint8)[words.itemsize - 1 :: words.itemsize]


def encode_shoal(old: Any, new: Any) -> bytes:
    out: list[bytes] = []
    Writer(out.append).piece(old, new)
    return b"".join(out)


def decode_shoal(packed: bytes, old: Any) -> Any:
    reader = Reader(io.BytesIO(MAGIC + packed), 0)
    kind, new = reader.piece_kind(), old.copy()
    if kind is Kind.WHOLE:
        return reader.words(len(old), old.itemsize)
    if kind is Kind.CHANGES:
        places, steps = reader.changes(len(old), old.itemsize)
        new[places] += steps
    return new


def gaps(places: Any) -> Any:
    return (np.diff(places, prepend=-1) - 1).astype("<u4")


def ungaps(figures: Any) -> Any:
    return np.cumsum(figures + np.int64(1)) - 1


def zigzag(differences: Any) -> Any:
    signed = differences.view(f"<i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(differences.dtype)


def unzigzag(numbers: Any) -> Any:
    return (numbers >> 1) ^ np.negative(numbers & 1)


def ordered(words: Any) -> Any:
    """Return the words as integers that sort like the floating-point numbers they encode."""
    sign = words.dtype.type(1 << (8 * words.itemsize - 1))
    return np.where(words & sign, ~words, words | sign)


def unordered(integers: Any) -> Any:
    sign = integers.dtype.type(1 << (8 * integers.itemsize - 1))
    return np.where(integers & sign, integers ^ sign, ~integers)


STEPS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "xor": (lambda old, new: old ^ new, lambda old, step: old ^ step),
    "difference": (lambda old, new: zigzag(new - old), lambda old, step: old + unzigzag(step)),
    "ordered": (
        lambda old, new: zigzag(ordered(new) - ordered(old)),
        lambda old, step: unordered(ordered(old) + unzigzag(step)),
    ),
}
WAYS: dict[str, tuple[Callable[[Any, Any], bytes], Callable[[bytes, Any], Any]]] = {
    "shoal": (encode_shoal, decode_shoal),
    **{f"xor, zstd {level}": (partial(encode_xor, level), decode_xor) for level in (1, 3)},
    "bitmask, difference, zstd 1": (partial(encode_bitmask, 1), decode_bitmask),
    **{
        f"gaps, {name}, zstd {level}": (
            partial(encode_gaps, level, STEPS[name][0]),
            partial(decode_gaps, STEPS[name][1]),
        )
        for name, level in (("difference", 3), ("xor", 1), ("ordered", 1))
    },
    "grouped, difference, zstd 1": (encode_grouped, decode_grouped),
}


# --- Output ---


def medians(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    with_ways = [pair for pair in pairs if "ways" in pair]

    def over(of: list[dict[str, Any]], get: Callable[[dict[str, Any]], float]) -> float:
        return float(f"{median(map(get, of)):.5g}")

    def row(of: list[dict[str, Any]], get: Callable[[dict[str, Any]], Any], whole: str) -> dict[str, float]:
        figures = {"times_smaller": over(of, lambda pair: pair[whole] / get(pair)["bytes"])}
        figures["bytes"] = over(of, lambda pair: get(pair)["bytes"])
        for what, kind in ((what, kind) for what in ("encode", "apply") for kind in ("clock", "cpu")):
            figures[f"{what} {kind}_s"] = over(of, lambda pair, what=what, kind=kind: get(pair)[f"{what}_s"][kind])
        return figures

    return {
        "pairs": len(pairs),
        "changed_share": over(pairs, lambda pair: pair["changed_words"] / pair["words"]),
        "files": row(pairs, lambda pair: pair["files"], "whole_bytes"),
        "links": {
            link: {
                "whole_s": over(pairs, lambda pair, bits_s=bits_s: 8 * pair["whole_bytes"] / bits_s),
                "encode, delta, apply clock_s": over(pairs, partial(seconds_over, bits_s, "clock")),
                "encode, delta, apply cpu_s": over(pairs, partial(seconds_over, bits_s, "cpu")),
            }
            for link, bits_s in LINKS_BITS_S.items()
        },
        "a model, cpu": {
            what: over(pairs, lambda pair, what=what: pair["a model"][what]["cpu"]) for what in pairs[0]["a model"]
        },
        "pairs_with_ways": len(with_ways),
        "one_unit_share": over(with_ways, lambda pair: pair["one_unit_share"]),
        "ways": {name: row(with_ways, lambda pair, name=name: pair["ways"][name], "ways_of_bytes") for name in WAYS},
        "grouped_pays_below_mb_s": over(with_ways, lambda pair: pair["grouped_pays_below_mb_s"]),
    }


def seconds_over(bits_s: float, kind: str, pair: dict[str, Any]) -> float:
    files = pair["files"]
    return float(files["encode_s"][kind] + 8 * files["bytes"] / bits_s + files["apply_s"][kind])


def show(label: str, figures: dict[str, Any]) -> None:
    out = sys.stdout.write
    out(f"{label}: {figures['pairs']} pairs, {figures['changed_share']:.2%} of words changed")
    out(f", {figures['one_unit_share']:.0%} of these by one unit\n")
    for name, row in {"files": figures["files"], **figures["ways"]}.items():
        out(f"  {name:28} {row['bytes']:10.0f} bytes {row['times_smaller']:7.1f} x smaller")
        out(f"   encode {row['encode clock_s']:.3f} s (CPU {row['encode cpu_s']:.3f})")
        out(f"   apply {row['apply clock_s']:.3f} s (CPU {row['apply cpu_s']:.3f})\n")
    for key in ("links", "a model, cpu", "grouped_pays_below_mb_s"):
        out(f"  {key}: {json.dumps(figures[key])}\n")


if __name__ == "__main__":
    main()

"""Documents are read from files of every format, and token streams resume at any token."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from shoal.errors import UserError
from shoal.learner.pretrain.text import PIECE_BYTES, Corpus, EndError, TextPlace, TokenStream, heldout
from tests.conftest import tiny_tokenizer

TEXTS = [f"{i}:" + "ab" * (i % 5) for i in range(11)]


def write(folder: Path, name: str, texts: list[str] = TEXTS) -> Path:
    path = folder / name
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=3)
        return path
    lines = "".join(json.dumps({"text": text, "url": "x"}) + "\n\n" for text in texts).encode()
    path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    return path


def texts(corpus: Corpus) -> list[str]:
    result: list[str] = []
    while True:
        try:
            result.append(corpus.document(len(result)).text)
        except EndError as end:
            assert end.count == len(result)
            return result


@pytest.mark.parametrize("name", ["a.jsonl", "c4-train.00000.json.gz", "a.parquet"])
def test_every_format_gives_the_same_documents(name, tmp_path):
    corpus = Corpus(str(write(tmp_path, name)))
    assert texts(corpus) == TEXTS
    assert [corpus.document(number).text for number in (7, 8, 2)] == [TEXTS[7], TEXTS[8], TEXTS[2]]
    (tmp_path / "more").mkdir()
    assert Corpus(str(write(tmp_path / "more", name))).fingerprint() == corpus.fingerprint()
    assert Corpus(str(write(tmp_path / "more", name, TEXTS[1:]))).fingerprint() != corpus.fingerprint()
    write(tmp_path, "z.jsonl", ["three"])
    assert texts(Corpus(f"{tmp_path}/[az]*.*")) == [*TEXTS, "three"] or name.startswith("c4"), (
        "files must be read in the order of their names"
    )


def test_a_text_file_is_the_concatenation_of_its_pieces(tmp_path):
    content = "".join(f"line {i} ünï\r\n" for i in range(5000)) + "no end"
    path = tmp_path / "a.txt"
    path.write_bytes(content.encode())
    corpus = Corpus(str(path))
    pieces = [corpus.document(number) for number in range(len(texts(corpus)))]
    assert "".join(piece.text for piece in pieces) == content
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece.text) for piece in pieces) < PIECE_BYTES + 100


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl, row 2 is not readable as JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}\n', "a.jsonl, row 2: no text in 'text'; see pretrain.field"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.csv", b"", "ends in none of"),
    ],
)
def test_the_error_for_a_faulty_file_names_it(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        texts(Corpus(str(tmp_path / name)))


def test_a_pattern_without_files_and_an_empty_setting_are_refused(tmp_path):
    with pytest.raises(UserError, match="no file matches"):
        Corpus(f"{tmp_path}/*.jsonl")
    with pytest.raises(UserError, match=r"pretrain\.data is empty"):
        Corpus("")


def test_files_of_a_hub_data_set_are_fetched(tmp_path, monkeypatch):
    for name in ("en/part-1.txt", "en/part-0.txt", "de/part-0.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    requests = []

    def download(name: str, repo_type: str, allow_patterns: list[str]) -> str:
        requests.append((name, repo_type, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    corpus = Corpus("allenai/c4:en/*.txt")
    assert requests == [("allenai/c4", "dataset", ["en/*.txt"])]
    assert [corpus.document(number).text for number in range(2)] == ["en/part-0.txt", "en/part-1.txt"]

    def unreachable(*_: object, **__: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(UserError, match=r"allenai/c4 could not be fetched .*no route to host.*hf download allenai/c4"):
        Corpus("allenai/c4:en/*.txt")


def stream(folder: Path, **changed: Any) -> TokenStream:
    return TokenStream(Corpus(str(write(folder, "a.jsonl"))), tiny_tokenizer(), **({"first": 2, "share": 4} | changed))


def test_every_epoch_is_all_documents_concatenated(tmp_path):
    wanted = tiny_tokenizer()("<eos>".join([*TEXTS[2:], ""]))["input_ids"]
    opened = stream(tmp_path)
    assert opened.sequences(1, len(wanted)).flatten().tolist() == wanted
    assert opened.sequences(1, 2 * len(wanted)).flatten().tolist() == 2 * wanted


@pytest.mark.parametrize("before", [1, 7, 40, 130])
def test_a_stream_resumes_at_any_token(before, tmp_path):
    whole = stream(tmp_path).sequences(1, before + 60).flatten().tolist()
    first = stream(tmp_path)
    first.sequences(1, before)
    again = stream(tmp_path)
    assert first.place is not None
    again.move(TextPlace(**json.loads(json.dumps(first.place.to_json()))))
    assert again.sequences(1, 60).flatten().tolist() == whole[before:]


def test_sites_that_take_different_shares_read_every_document_once(tmp_path):
    given = iter(range(100))
    sites = [stream(tmp_path, first=3, share=2, take=lambda: next(given)) for _ in range(3)]
    tokenizer, read = tiny_tokenizer(), [""] * 3
    for _ in range(100):
        for number in (0, 1, 1, 2):
            place = sites[number].place
            if place is not None and place.share >= 4:  # the second epoch
                continue
            read[number] += tokenizer.decode(sites[number].sequences(1, 1).flatten())
    result = [text for part in read for text in part.split("<eos>") if text]
    assert sorted(result) == sorted(TEXTS[3:])


def test_held_out_documents_are_cut_into_full_sequences(tmp_path):
    corpus = Corpus(str(write(tmp_path, "a.jsonl")))
    tokens = tiny_tokenizer()("0:<eos>1:ab<eos>")["input_ids"]
    assert heldout(corpus, tiny_tokenizer(), 2, 3).tolist() == [tokens[:3], tokens[3:6]]
    with pytest.raises(UserError, match="there are only 11 documents"):
        heldout(corpus, tiny_tokenizer(), 12, 3)
    with pytest.raises(UserError, match=r"raise pretrain\.heldout"):
        heldout(corpus, tiny_tokenizer(), 1, 100)
    with pytest.raises(UserError, match="none is left to train on"):
        stream(tmp_path, first=11).sequences(1, 1)

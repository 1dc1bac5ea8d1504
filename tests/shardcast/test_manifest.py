"""Manifests: canonical text, digests, signatures, and what makes a manifest well-formed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.shardcast import Manifest, ManifestError, SignedManifest
from shoal.shardcast.manifest import SIGNATURE_DOMAIN, STATEMENT_DOMAIN, Newest, SignedNewest

from .support import KEY, OTHER_KEY, PUBLIC_KEY, PUBLICATION

HASH = "0" * 64


def fields(**changes):
    return {
        "format": 5,
        "run": "test",
        "publication": PUBLICATION,
        "version": 7,
        "files": [{"path": "model.safetensors", "size_bytes": 25}, {"path": "sub/config.json", "size_bytes": 0}],
        "content": stream(),
        "anchor": True,
        "delta": None,
        "created_s": 1.5,
        **changes,
    }


def stream(size_bytes: int = 25, hashes: str = "abc", shard_size_bytes: int = 10):
    return {"size_bytes": size_bytes, "shard_size_bytes": shard_size_bytes, "shards": [digit * 64 for digit in hashes]}


def delta(parent: int = 6, **changes):
    return {"delta": {"parent": parent, "parent_digest": HASH, "stream": stream(5, "d"), **changes}}


def manifest(**changes) -> Manifest:
    return Manifest.model_validate_json(json.dumps(fields(**changes)))


def signed_text(text: str) -> SignedManifest:
    """Sign any text with the right key. A valid signature does not make a text well-formed."""
    return SignedManifest(manifest=text, key=PUBLIC_KEY, signature=KEY.sign(SIGNATURE_DOMAIN + text.encode()).hex())


def signed(**changes) -> SignedManifest:
    return signed_text(json.dumps(fields(**changes), sort_keys=True, separators=(",", ":")))


def files(*paths: str):
    return {"files": [{"path": path, "size_bytes": 0} for path in paths], "content": stream(0, "")}


def test_signed_manifest_opens_to_the_same_manifest_and_digest():
    original = manifest()
    opened = SignedManifest.parse(SignedManifest.sign(original, KEY).to_bytes()).open(PUBLIC_KEY, run="test", version=7)
    assert opened == original
    assert opened.digest == original.digest
    assert opened.canonical() == original.canonical()


def test_the_digest_depends_on_the_contents():
    digests = {
        manifest().digest,
        manifest(version=8).digest,
        manifest(run="b").digest,
        manifest(content=stream(hashes="abd")).digest,
        manifest(**files("other", "names")).digest,
    }
    assert len(digests) == 5


def test_the_digest_does_not_depend_on_which_streams_can_be_fetched():
    whole, both, delta_only = manifest(), manifest(**delta()), manifest(anchor=False, **delta())
    assert whole.digest == both.digest == delta_only.digest
    assert len({each.canonical() for each in (whole, both, delta_only)}) == 3
    assert [list(each.streams) for each in (whole, both, delta_only)] == [["full"], ["full", "delta"], ["delta"]]


def test_the_last_shard_is_shorter():
    assert [(shard.index, shard.size_bytes) for shard in manifest().content.entries()] == [(0, 10), (1, 10), (2, 5)]


def test_a_later_manifest_or_one_of_another_publication_supersedes_a_manifest():
    assert not manifest(**delta()).supersedes(manifest())
    assert manifest(created_s=1.6).supersedes(manifest()) and not manifest().supersedes(manifest(created_s=1.6))
    assert manifest(publication="b" * 32).supersedes(manifest()) and manifest().supersedes(
        manifest(publication="b" * 32)
    )


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (SignedManifest.sign(manifest(), OTHER_KEY), "wrong signer"),
        (SignedManifest.sign(manifest(), OTHER_KEY).model_copy(update={"key": PUBLIC_KEY}), "bad signature"),
        (SignedManifest.sign(manifest(), KEY).model_copy(update={"manifest": "{}"}), "bad signature"),
        (signed_text("{}"), "malformed"),
        (signed_text(json.dumps(fields())), "not canonical"),
        (signed(format=3), "format"),
        (signed(publication="x" * 32), "publication"),
        (signed(surplus=1), "surplus"),
        (signed(version=-1), "version"),
        (signed(content=stream(26)), "add up"),
        (signed(content=stream(hashes="abcd")), "4 shards, but 25 bytes need 3"),
        (signed(content=stream(hashes="abc", shard_size_bytes=0)), "shard_size_bytes"),
        (signed(content=stream(hashes="xyz")), "shards.0"),
        (signed(anchor=False), "not an anchor"),
        (signed(content=stream(hashes="ab")), "2 shards, but 25 bytes need 3"),
        (signed(**delta(parent=7)), "earlier parent"),
        (signed(**delta(stream=stream(5, ""))), "0 shards, but 5 bytes need 1"),
        (signed(files=[]), "files"),
        (signed(**files("/etc/passwd")), "plain relative path"),
        (signed(**files("../up")), "plain relative path"),
        (signed(**files("a/../../up")), "plain relative path"),
        (signed(**files("a//b")), "plain relative path"),
        (signed(**files("a\\b")), "plain relative path"),
        (signed(**files("a\0b")), "plain relative path"),
        (signed(**files("line\nbreak")), "plain relative path"),
        (signed(**files("\u202egnp.exe")), "plain relative path"),
        (signed(**files("x" * 256)), "plain relative path"),
        (signed(**files("same", "same")), "twice"),
        (signed(**files("Same", "same")), "are one file"),
        (signed(**files("a", "a.")), "are one file"),
        (signed(**files("a", "a/b")), "both a file and a folder"),
        (signed(run="other"), "run 'other'"),
        (signed(version=8), "version 8"),
        (signed(created_s=float("nan")), "created_s"),
    ],
)
def test_an_invalid_manifest_is_refused_with_the_reason(forged, reason):
    with pytest.raises(ManifestError, match=reason):
        forged.open(PUBLIC_KEY, run="test", version=7)


def test_more_shards_or_bytes_than_the_bounds_are_refused():
    many = stream(100_001, "a" * 100_001, shard_size_bytes=1)
    huge = stream((1 << 40) + 1, "", shard_size_bytes=1 << 39)
    for content, reason in ((many, "content.shards"), (huge, "size_bytes")):
        with pytest.raises(ManifestError, match=reason):
            signed(files=[{"path": "a", "size_bytes": content["size_bytes"]}], content=content).open(PUBLIC_KEY)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300))
def test_parsing_any_bytes_gives_a_manifest_error(body):
    with pytest.raises(ManifestError):
        SignedManifest.parse(body).open(PUBLIC_KEY)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(sorted(fields())), json_values)
def test_a_signed_manifest_with_any_value_in_a_field_is_consistent_or_refused(name, value):
    try:
        opened = signed(**{name: value}).open(PUBLIC_KEY)
    except ManifestError:
        return
    assert sum(file.size_bytes for file in opened.files) == opened.size_bytes
    assert sum(shard.size_bytes for shard in opened.content.entries()) == opened.size_bytes
    assert all(not file.path.startswith("/") and ".." not in file.path.split("/") for file in opened.files)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=20))
def test_a_path_that_is_accepted_stays_inside_the_folder(path):
    try:
        opened = signed(**files(path)).open(PUBLIC_KEY)
    except ManifestError:
        return
    parts = opened.files[0].path.split("/")
    assert all(part not in ("", ".", "..") and part.isascii() and "\\" not in part for part in parts)


def test_a_statement_has_one_text():
    statement = Newest(run="run", publication=PUBLICATION, version=1, serial=1, as_of_s=1.0).model_dump_json()
    for text in (statement, statement.replace(":", ": "), statement.replace('"version":', '"version":9,"version":')):
        signed = SignedNewest(statement=text, signature=KEY.sign(STATEMENT_DOMAIN + text.encode()).hex())
        assert (signed.open(PUBLIC_KEY) is not None) == (text == statement)

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import shoal
from shoal.protocol.identity import (
    FIELD_PRIME,
    SMALL_ORDER_Y,
    Identity,
    IdentityError,
    Signed,
    public_key,
    verify,
)
from shoal.shardcast import ManifestError, SignedManifest, guard
from shoal.shardcast.guard import Refused
from shoal.shardcast.manifest import SignedNewest

ALICE = Identity(Ed25519PrivateKey.from_private_bytes(bytes(32)))
MESSAGE = b"four legs good"


def test_a_signature_is_valid_only_for_its_key_message_and_domain() -> None:
    signature = ALICE.sign(MESSAGE, domain="ledger")
    assert verify(ALICE.public, MESSAGE, signature, domain="ledger")
    assert not verify(ALICE.public, MESSAGE, signature, domain="manifest")
    assert not verify(ALICE.public, b"two legs good", signature, domain="ledger")
    assert not verify(Identity.generate().public, MESSAGE, signature, domain="ledger")


def test_signed_bytes_begin_with_the_domain() -> None:
    plain = ALICE.private_key.sign(b"shoal/ledger\nfour legs good").hex()
    assert ALICE.sign(MESSAGE, domain="ledger") == plain
    assert ALICE.public == "3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29", (
        "the key of the zero seed must be the published one"
    )


@pytest.mark.parametrize("domain", ["", "a\nb", "Ledger", "x" * 65])
def test_a_bad_domain_is_refused(domain: str) -> None:
    with pytest.raises(ValueError, match="domain"):
        ALICE.sign(MESSAGE, domain=domain)


@given(public=st.text(), signature=st.text(), domain=st.text())
def test_garbage_does_not_verify(public: str, signature: str, domain: str) -> None:
    good = ALICE.sign(MESSAGE, domain="ledger")
    assert not verify(public, MESSAGE, good, domain="ledger")
    assert not verify(ALICE.public, MESSAGE, signature, domain="ledger")
    assert not verify(ALICE.public, MESSAGE, good, domain=domain)


@given(raw=st.binary(min_size=32, max_size=32))
def test_a_signature_does_not_verify_under_any_other_32_bytes(raw: bytes) -> None:
    assert not verify(raw.hex(), MESSAGE, ALICE.sign(MESSAGE, domain="ledger"), domain="ledger")


def test_a_key_has_only_one_spelling() -> None:
    signature = ALICE.sign(MESSAGE, domain="ledger")
    for spelling in (ALICE.public.upper(), f" {ALICE.public}", f"{ALICE.public}\n"):
        assert not verify(spelling, MESSAGE, signature, domain="ledger")


@pytest.mark.parametrize("y", sorted(SMALL_ORDER_Y | {FIELD_PRIME, FIELD_PRIME + 1}))
@pytest.mark.parametrize("sign_bit", [0, 1])
def test_small_order_keys_are_refused(y: int, sign_bit: int) -> None:
    with pytest.raises(IdentityError, match="not a safe point"):
        public_key((y | sign_bit << 255).to_bytes(32, "little").hex())


def test_a_signature_made_without_a_private_key_is_refused() -> None:
    neutral = (1).to_bytes(32, "little")
    forged = neutral + bytes(32)  # with R neutral and S zero, it is valid for every message under the neutral key
    Ed25519PublicKey.from_public_bytes(neutral).verify(forged, MESSAGE)  # the library accepts it without an error
    assert not verify(neutral.hex(), MESSAGE, forged.hex(), domain="ledger")


def test_a_saved_key_is_readable_by_its_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ALICE.save(tmp_path / "key.pem")
    finally:
        os.umask(before)
    with pytest.raises(FileExistsError):
        Identity.generate().save(tmp_path / "key.pem")
    assert Identity.load(tmp_path / "key.pem").public == ALICE.public
    assert stat.S_IMODE((tmp_path / "key.pem").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["key.pem"]


def pem(key: Any, encryption: Any = None) -> bytes:
    made: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())
    return made


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        pem(generate_private_key(SECP256R1())),
        pem(ALICE.private_key, BestAvailableEncryption(b"secret")),
    ],
    ids=["empty", "text", "cut", "another kind", "encrypted"],
)
def test_the_error_for_an_unusable_key_file_names_it_and_it_is_never_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(content)
    for load in (Identity.load, Identity.load_or_create):
        with pytest.raises(IdentityError, match="key.pem is not an ed25519 private key .*: restore it"):
            load(path)
    assert path.read_bytes() == content


def test_the_error_for_a_missing_or_unreadable_key_file_names_it(tmp_path: Path) -> None:
    for path in (tmp_path / "key.pem", tmp_path):
        with pytest.raises(IdentityError, match=f"cannot read the key file {path} "):
            Identity.load(path)


def test_processes_that_start_at_once_get_the_same_new_key(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "key.pem"
    with ThreadPoolExecutor(8) as pool:
        identities = list(pool.map(lambda _: Identity.load_or_create(path), range(8)))
    assert {identity.public for identity in identities} == {Identity.load_or_create(path).public}


def test_repr_shows_no_secret() -> None:
    assert repr(ALICE) == "Identity()"


def test_a_signed_text_that_is_changed_or_for_another_signer_or_purpose_is_refused() -> None:
    signed = Signed.model_validate_json(Signed.make(ALICE, "fünf", domain="manifest").model_dump_json())
    assert signed.open(ALICE.public, domain="manifest") == "fünf"
    for changed in ({"payload": "x"}, {"signature": "0" * 128}, {"signature": "x"}):
        with pytest.raises(IdentityError, match="does not match"):
            signed.model_copy(update=changed).open(ALICE.public, domain="manifest")
    with pytest.raises(IdentityError, match="expected"):
        signed.open(Identity.generate().public, domain="manifest")
    with pytest.raises(IdentityError, match="domain ledger"):
        signed.open(ALICE.public, domain="ledger")


@pytest.mark.parametrize("text", ['{"payload": "a", "key": "b"}', '{"payload": "\\ud800", "key": "", "signature": ""}'])
def test_a_malformed_signed_text_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        Signed.model_validate_json(text)


def test_a_signed_text_with_a_repeated_key_is_refused() -> None:
    """Readers differ in which of the values they take."""
    signed = Signed.make(ALICE, '{"step":1,"step":2}', domain="trained")
    with pytest.raises(IdentityError, match="unclear: a key is repeated"):
        signed.open(ALICE.public, domain="trained")
    text = Signed.make(ALICE, "{}", domain="trained").model_dump_json()
    for double in (text.replace('"payload":', '"payload":"a lie","payload":'), text[:-1] + ',"key":"x"}', "[" * 99_999):
        with pytest.raises(ValidationError):
            Signed.model_validate_json(double)
    assert Signed.model_validate_json(text).open(ALICE.public, domain="trained") == "{}"


def test_every_public_key_is_read_in_one_place() -> None:
    source = Path(shoal.__file__).parent
    readers = [path for path in source.rglob("*.py") if "from_public_bytes" in path.read_text()]
    assert readers == [source / "identity.py"]


@pytest.mark.parametrize("y", sorted(SMALL_ORDER_Y))
def test_an_unsafe_key_verifies_no_manifest_statement_or_pass(y: int) -> None:
    """With such a key, a signature made without any private key is valid for some texts."""
    key = y.to_bytes(32, "little").hex()
    forged = (1).to_bytes(32, "little").hex() + "0" * 64
    manifest = SignedManifest(manifest="{}", key=key, signature=forged)
    with pytest.raises(ManifestError, match="bad signature"):
        manifest.open(key)
    assert SignedNewest(statement="{}", signature=forged).open(key) is None
    with pytest.raises(Refused):
        guard._verified(f"e30.{forged}", key, guard.VISIT_DOMAIN, guard.Visit, "forged")

"""What is never published: private keys, hidden files, links to files elsewhere, and the store itself."""

import os
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from shoal.shardcast import PublishError
from shoal.shardcast.origin import check_apart

from .support import KEY, model_folder, origin, weights_folder

PEM, PLAIN = serialization.Encoding.PEM, serialization.NoEncryption()
RSA = rsa.generate_private_key(65537, 2048)
FORMATS = serialization.PrivateFormat
PKCS8 = KEY.private_bytes(PEM, FORMATS.PKCS8, PLAIN)
CERTIFICATE = b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
KEYS = {
    "PKCS #8": PKCS8,
    "PKCS #8 with Windows line ends": PKCS8.replace(b"\n", b"\r\n"),
    "encrypted": KEY.private_bytes(PEM, FORMATS.PKCS8, serialization.BestAvailableEncryption(b"secret")),
    "RSA": RSA.private_bytes(PEM, FORMATS.TraditionalOpenSSL, PLAIN),
    "EC": ec.generate_private_key(ec.SECP256R1()).private_bytes(PEM, FORMATS.TraditionalOpenSSL, PLAIN),
    "OpenSSH": KEY.private_bytes(PEM, FORMATS.OpenSSH, PLAIN),
    "OpenPGP": b"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n=abcd\n",
}


def assert_refused(tmp_path, path: Path, name: str) -> None:
    source = origin(tmp_path)
    with pytest.raises(PublishError, match=f"{name} looks like a private key; move it out"):
        source.publish(path, 0)
    assert source.published() == []


@pytest.mark.parametrize("kind", KEYS)
def test_a_file_that_contains_a_private_key_is_refused(tmp_path, kind):
    folder = model_folder(tmp_path / "model")
    (folder / "tokenizer" / "notes.txt").write_bytes(CERTIFICATE + KEYS[kind])
    assert_refused(tmp_path, folder, "tokenizer/notes.txt")


@pytest.mark.parametrize("name", ["identity.pem", "id_ed25519"])
def test_a_file_named_like_a_private_key_is_refused_whatever_it_contains(tmp_path, name):
    folder = model_folder(tmp_path / "model")
    (folder / name).write_bytes(b"\x00")
    assert_refused(tmp_path, folder, name)


@pytest.mark.parametrize(("name", "data"), [("elsewhere", KEYS["OpenSSH"]), ("id_rsa", b"\x00")])
def test_a_link_to_a_private_key_is_refused(tmp_path, name, data):
    folder = model_folder(tmp_path / "model")
    (tmp_path / name).write_bytes(data)
    (folder / "innocent").symlink_to(tmp_path / name)
    assert_refused(tmp_path, folder, "innocent")


def test_a_single_file_that_is_a_private_key_is_refused(tmp_path):
    (tmp_path / "key").write_bytes(PKCS8)
    assert_refused(tmp_path, tmp_path / "key", "key")


def test_public_keys_certificates_and_text_about_keys_are_published(tmp_path):
    folder = model_folder(tmp_path / "model")
    public = KEY.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "key.pub").write_bytes(public + CERTIFICATE)
    (folder / "data.jsonl").write_text('{"text": "a key starts with -----BEGIN PRIVATE KEY----- and then"}\n')
    assert "key.pub" in {file.path for file in origin(tmp_path).publish(folder, 0).files}


@pytest.mark.parametrize("published", ["model", "link"])
def test_a_store_inside_the_published_folder_is_refused(tmp_path, published):
    folder = model_folder(tmp_path / "model")
    (tmp_path / "link").symlink_to(folder)
    source = origin(folder)
    with pytest.raises(PublishError, match="choose a store outside"):
        source.publish(tmp_path / published, 0)
    assert source.published() == []


def test_a_store_and_a_key_beside_the_published_folder_are_fine(tmp_path):
    folder = model_folder(tmp_path / "model")
    check_apart(folder, tmp_path / "model2", tmp_path / "origin.pem")
    check_apart(folder / "config.json", folder / "store", folder / "origin.pem")


def test_hidden_files_and_folders_are_not_published(tmp_path):
    folder = model_folder(tmp_path / "model")
    (folder / ".env").write_text("TOKEN=secret")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("[remote]")
    names = [part for file in origin(tmp_path).publish(folder, 0).files for part in file.path.split("/")]
    assert not any(name.startswith(".") for name in names)


# Links


def hub_snapshot(cache) -> Path:
    """Write a model as in Hugging Face's cache, where its files are links into a folder of blobs."""
    snapshot = cache / "models--org--name" / "snapshots" / "0f1e"
    for number, file in enumerate(sorted(path for path in weights_folder(cache / "given").iterdir())):
        blob = cache / "models--org--name" / "blobs" / f"{number:040x}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        file.rename(blob)
        (snapshot / file.name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_a_snapshot_in_hugging_faces_cache_is_published_and_the_next_version_has_a_delta(tmp_path):
    snapshot, source = hub_snapshot(tmp_path / "hub"), origin(tmp_path, anchor_every=100)
    (tmp_path / "watched").mkdir()
    (tmp_path / "watched" / "v000000").symlink_to(snapshot)
    assert source.publish(tmp_path / "watched" / "v000000", 0).size_bytes > 40_000
    shutil.rmtree(tmp_path / "hub")
    assert source.publish(weights_folder(tmp_path / "next", 1), 1).delta is not None


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("../elsewhere", "link is a link to .*elsewhere, outside"),
        ("../other", "link is a link to a folder"),
        ("gone.bin", "link is a link to gone.bin, which is missing"),
    ],
)
def test_a_link_that_leaves_the_folder_or_names_a_folder_or_nothing_is_refused(tmp_path, target, reason):
    folder = model_folder(tmp_path / "model")
    (tmp_path / "elsewhere").write_bytes(b"private notes")
    model_folder(tmp_path / "other")
    (folder / "link").symlink_to(target)
    with pytest.raises(PublishError, match=reason):
        origin(tmp_path).publish(folder, 0)


def test_a_link_inside_the_folder_is_followed(tmp_path):
    folder = model_folder(tmp_path / "model")
    (folder / "same.json").symlink_to("config.json")
    assert "same.json" in {file.path for file in origin(tmp_path).publish(folder, 0).files}

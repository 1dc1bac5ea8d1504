"""What a version is published from: the files of a folder, in order, and what must never be among them.

Invariant: no file that looks like a private key is published, not through a symbolic link either. A link is followed only
if it stays inside the folder, or inside the Hugging Face cache entry that the folder is a snapshot of. Files and folders
whose names start with a dot stay unpublished.
Left out: keys after the first `SCANNED_BYTES` of a file, and in formats other than PEM, OpenSSH, OpenPGP, PuTTY, DER
and PKCS #12.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_der_private_key
from pydantic import ValidationError

from shoal.errors import ShoalError
from shoal.files import CHUNK_BYTES
from shoal.shardcast.files import LayoutError, read_layout
from shoal.shardcast.manifest import FileEntry, ManifestError, TensorEntry, check_paths, first_problem

SCANNED_BYTES = 64 << 20
PIECE_BYTES, OVERLAP_BYTES = 4 << 20, 256
DER_BYTES = 64 << 10  # no private key is longer
KEY_NAMES = {"identity.pem", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk"}
# PKCS #8, PKCS #1, SEC 1, OpenSSH, OpenPGP, PuTTY
KEY_TEXT = re.compile(
    rb"^[ \t]*(-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-\d)", re.MULTILINE
)
PKCS12 = re.compile(rb"\x30(?:[\x00-\x7f]|\x80|\x81.|\x82..|\x83...)\x02\x01\x03\x30", re.DOTALL)  # version 3


class PublishError(ShoalError, ValueError):
    """This cannot be published, and why."""


def check_apart(path: Path, store: Path, *keys: Path) -> None:
    """Raises PublishError if the store or a private key lies inside the folder to publish, or is the file to publish."""
    published = path.resolve()
    if store.resolve().is_relative_to(published):
        raise PublishError(f"the store {store} lies inside {path}, which is published; choose a store outside of it")
    for key in keys:
        if key.resolve().is_relative_to(published):
            raise PublishError(f"the key file {key} lies inside {path}, which is published; keep the key outside of it")


def files_at(path: Path) -> tuple[Path, list[FileEntry]]:
    """The folder, and the files in it to publish, in order: all of them, or the one file that `path` names.
    Raises ManifestError, PublishError."""
    folder = path.resolve() if path.is_dir() else path.parent
    paths = _files_in(folder) if path.is_dir() else [path]
    check_paths([file.relative_to(folder).as_posix() for file in paths])  # before a file is read
    if not paths:
        raise ManifestError(f"{folder} holds no files; put the files to publish there")
    return folder, [_entry(file, folder) for file in paths]


def _entry(path: Path, folder: Path) -> FileEntry:
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        _refuse_key(path, file, size_bytes)
    _refuse_stray_link(path, folder)
    name = path.relative_to(folder).as_posix()
    try:
        return FileEntry(path=name, size_bytes=size_bytes, tensors=_tensors(path))
    except ValidationError as error:
        raise ManifestError(f"{name} cannot be published: {first_problem(error)}") from error


def file_times(folder: Path, files: Sequence[FileEntry]) -> list[int]:
    return [(folder / file.path).stat().st_mtime_ns for file in files]


def file_chunks(folder: Path, files: Sequence[FileEntry]) -> Iterator[memoryview]:
    """The files' bytes; each view is valid until the next one."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for file_entry in files:
        with (folder / file_entry.path).open("rb", buffering=0) as file:
            while size_bytes := file.readinto(buffer):
                yield buffer[:size_bytes]


def _files_in(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.rglob("*")):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        if path.is_symlink() and path.is_dir():
            raise PublishError(
                f"{path} is a link to a folder; replace it by the folder's files, or publish that folder"
            )
        if path.is_symlink() and not path.exists():
            raise PublishError(
                f"{path} is a link to {path.readlink()}, which is missing; restore it or remove the link"
            )
        if path.is_file():
            found.append(path)
    return found


def _refuse_stray_link(path: Path, folder: Path) -> None:
    if not path.is_symlink():
        return
    target, folder = path.resolve(), folder.resolve()
    # Hugging Face's cache: models--org--name/snapshots/REVISION/config.json -> ../../blobs/HASH
    blobs = [folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else []
    if not any(target.is_relative_to(place) for place in [folder, *blobs]):
        raise PublishError(f"{path} is a link to {target}, outside of {folder}; put a copy in its place")


def _refuse_key(path: Path, file: BinaryIO, size_bytes: int) -> None:
    names = {path.name, path.resolve().name}
    if names & KEY_NAMES or _holds_key(path, file, size_bytes):
        raise PublishError(f"{path} looks like a private key; move it out of the published folder, then publish again")


def _holds_key(path: Path, file: BinaryIO, size_bytes: int) -> bool:
    if size_bytes <= DER_BYTES and _is_der_key(file.read(DER_BYTES)):
        return True
    if path.suffix == ".safetensors" and size_bytes > PIECE_BYTES:
        return False  # the header says what every byte is
    for start in range(0, min(size_bytes, SCANNED_BYTES), PIECE_BYTES):
        file.seek(max(start - OVERLAP_BYTES, 0))
        piece = file.read(PIECE_BYTES + OVERLAP_BYTES)
        if (b"PRIVATE KEY" in piece or b"PuTTY-User-Key-File" in piece) and KEY_TEXT.search(piece):
            return True
    return False


def _is_der_key(data: bytes) -> bool:
    if not data.startswith(b"\x30"):
        return False
    if PKCS12.match(data):
        return True
    try:
        load_der_private_key(data, password=None)
    except TypeError:
        return True  # encrypted
    except (ValueError, UnsupportedAlgorithm):
        return False
    return True


def _tensors(path: Path) -> tuple[TensorEntry, ...]:
    if path.suffix != ".safetensors":
        return ()
    try:
        layout = read_layout(path)
    except LayoutError:
        return ()  # published like any other file
    return tuple(TensorEntry(name=found.name, dtype=found.dtype, shape=found.shape) for found in layout.tensors)

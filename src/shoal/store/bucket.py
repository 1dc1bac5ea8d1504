"""A bucket of immutable, content-addressed files: the store of a pool whose files outgrow one machine.

    grant  make a URL with which a node may upload one file       incoming/KIND/ID/SHA256
    check  read the uploaded file and verify its hash
    keep   move the file to its final name                        KIND/BLAKE3.parquet
    link   make a URL with which a node may download one file

Invariant: a file under its final name has the content that the name states, and no node can write there. A grant is bound
to one size and SHA-256, cannot overwrite a file, and reaches only names under `incoming/`. `check` and `get` read
the file and verify its hash, so it does not matter what the bucket checks. Credentials stay in this process.
Called by the coordinator. Needs the extra `s3` (obstore). Left out: removing unfinished uploads. Give `incoming/` a
lifecycle rule that deletes files after one day.
"""

import base64
import hashlib
import hmac
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Self
from urllib.parse import quote, urlsplit

import obstore
from blake3 import blake3
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import S3Store

from shoal.errors import first_line
from shoal.protocol.messages import UploadGrant
from shoal.store.folder import HASH, BucketError, DamagedFileError, StoreError

if TYPE_CHECKING:
    from obstore.store import S3Config

ALGORITHM = "AWS4-HMAC-SHA256"
GRANT_S = 600
ID = re.compile(r"[A-Za-z0-9._-]{1,200}")


@dataclass(frozen=True)
class S3Credentials:
    key_id: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)  # for temporary credentials

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """Read credentials from environment variables. Raise StoreError if they are missing."""
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        key_id, secret, token = (environment.get(name, "") for name in names)
        if not (key_id and secret):
            raise StoreError(
                "the bucket needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: set them in the environment"
            )
        return cls(key_id, secret, token)


class Bucket:
    def __init__(
        self,
        url: str,
        endpoint: str,
        credentials: S3Credentials | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`url`: s3://BUCKET/PREFIX; `endpoint`: "" for AWS; `credentials`: None to read them from the environment.

        The environment variable AWS_REGION names the region. Raise StoreError if there are no credentials.
        """
        parts = urlsplit(url)
        self.name, prefix = parts.netloc, parts.path.strip("/")
        self.prefix = f"{prefix}/" if prefix else ""
        self.region = os.environ.get("AWS_REGION", "us-east-1")
        self.host = endpoint.rstrip("/") or f"https://s3.{self.region}.amazonaws.com"
        self.credentials = credentials or S3Credentials.read(os.environ)
        self.clock = clock
        settings: S3Config = {
            "access_key_id": self.credentials.key_id,
            "secret_access_key": self.credentials.secret,
            "region": self.region,
            "virtual_hosted_style_request": False,
        }
        if self.credentials.token:
            settings["session_token"] = self.credentials.token
        if endpoint:
            settings["endpoint"] = self.host
        self.objects = S3Store(
            self.name,
            config=settings,
            client_options={"allow_http": endpoint.startswith("http://"), "timeout": "60s"},
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=20)},
        )

    def put(self, kind: str, data: bytes) -> str:
        """Store a file and return its hash. Storing the same bytes again changes nothing."""
        content_hash = blake3(data).hexdigest()
        with self._named_errors(f"cannot store the {kind} file"):
            obstore.put(self.objects, self._name(kind, content_hash), data)
        return content_hash

    def get(self, kind: str, content_hash: str) -> bytes:
        """Return a file. Raise DamagedFileError if it is missing or was changed, StoreError if it cannot be read."""
        with self._named_errors(f"cannot read {kind} file {content_hash[:16]}", missing=DamagedFileError):
            data = bytes(obstore.get(self.objects, self._name(kind, content_hash)).bytes())
        if blake3(data).hexdigest() != content_hash:
            raise DamagedFileError(f"{kind} file {content_hash[:16]} in {self} was changed in the bucket")
        return data

    def grant(self, kind: str, id: str, size_bytes: int, sha256: str) -> UploadGrant:
        """Return a signed request with which its holder may upload this one file within GRANT_S."""
        headers = {
            "content-length": str(size_bytes),
            "if-none-match": "*",
            "x-amz-checksum-sha256": base64.b64encode(bytes.fromhex(sha256)).decode(),
        }
        return UploadGrant(url=self._signed("PUT", self._incoming(kind, id, sha256), headers), headers=headers)

    def check(self, kind: str, id: str, size_bytes: int, sha256: str) -> str:
        """Return the content hash of an uploaded file. Raise StoreError if it is not the file that was announced."""
        received, content = hashlib.sha256(), blake3()
        source = self._incoming(kind, id, sha256)
        with self._named_errors(f"the file of {id} was not uploaded"):
            if (received_bytes := int(obstore.head(self.objects, source)["size"])) == size_bytes:
                for piece in obstore.get(self.objects, source).stream():
                    received.update(piece)
                    content.update(piece)
        if received.hexdigest() != sha256:
            obstore.delete(self.objects, source)
            raise StoreError(f"the file of {id}, {received_bytes} bytes, is not the announced file: upload it again")
        return content.hexdigest()

    def keep(self, kind: str, id: str, sha256: str, content_hash: str) -> None:
        """Move a checked file to its final name."""
        source = self._incoming(kind, id, sha256)
        with self._named_errors(f"cannot keep the file of {id}"):
            obstore.copy(self.objects, source, self._name(kind, content_hash))
            obstore.delete(self.objects, source)

    def drop(self, kind: str, id: str, sha256: str) -> None:
        """Remove an uploaded file that is not kept."""
        with self._named_errors(f"cannot remove the file of {id}"):
            obstore.delete(self.objects, self._incoming(kind, id, sha256))

    def remove(self, kind: str, content_hash: str) -> None:
        """Remove a file that nothing refers to."""
        with self._named_errors(f"cannot remove {kind} file {content_hash[:16]}"):
            obstore.delete(self.objects, self._name(kind, content_hash))

    def link(self, kind: str, content_hash: str) -> str:
        """Return a URL with which its holder may download this one file within GRANT_S."""
        return self._signed("GET", self._name(kind, content_hash), {})

    def _signed(self, method: str, name: str, headers: dict[str, str]) -> str:
        return presigned(
            method,
            f"{self.host}/{self.name}/{quote(name)}",  # path style, which every S3 server supports
            headers,
            credentials=self.credentials,
            region=self.region,
            now_s=self.clock(),
            expires_s=GRANT_S,
        )

    def _name(self, kind: str, content_hash: str) -> str:
        if not HASH.fullmatch(content_hash):
            raise StoreError(f"{content_hash!r} is not a content hash")
        return f"{self.prefix}{kind}/{content_hash}.parquet"

    def _incoming(self, kind: str, id: str, sha256: str) -> str:
        if not (ID.fullmatch(id) and HASH.fullmatch(sha256)):
            raise StoreError(f"invalid upload: id {id[:80]!r}, SHA-256 {sha256[:80]!r}")
        return f"{self.prefix}incoming/{kind}/{id}/{sha256}"

    @contextmanager
    def _named_errors(self, what: str, *, missing: type[StoreError] = StoreError) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotFoundError) as error:
            if "NoSuchBucket" in str(error):
                raise BucketError(f"{what}: the bucket {self.name} does not exist at {self.host}") from error
            raise missing(f"{what}: it is not in {self}") from error
        except BaseError as error:
            raise BucketError(f"{what} in {self}: {first_line(error)[:200]}") from error

    def __str__(self) -> str:
        return f"s3://{self.name}/{self.prefix}"


def presigned(
    method: str,
    url: str,
    headers: Mapping[str, str],
    *,
    credentials: S3Credentials,
    region: str,
    now_s: float,
    expires_s: int,
) -> str:
    """Return a URL that lets its holder make only this request. The query holds the signature (Signature Version 4).

    The path of `url` must be percent-encoded. The request must carry `headers` (names in lower case) exactly as signed.
    Source: AWS, "Authenticating Requests: Using Query Parameters". Left out: header values with repeated spaces.
    """
    parts = urlsplit(url)
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    signed = dict(sorted((dict(headers) | {"host": parts.netloc}).items()))
    names = ";".join(signed)
    query = {
        "X-Amz-Algorithm": ALGORITHM,
        "X-Amz-Credential": f"{credentials.key_id}/{scope}",
        "X-Amz-Date": moment,
        "X-Amz-Expires": str(expires_s),
        "X-Amz-SignedHeaders": names,
    }
    if credentials.token:
        query["X-Amz-Security-Token"] = credentials.token
    parameters = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in sorted(query.items()))
    lines = [f"{name}:{value}" for name, value in signed.items()]
    request = "\n".join([method, parts.path, parameters, *lines, "", names, "UNSIGNED-PAYLOAD"])
    text = "\n".join([ALGORITHM, moment, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{credentials.secret}".encode()
    for word in (moment[:8], region, "s3", "aws4_request"):
        key = hmac.digest(key, word.encode(), hashlib.sha256)
    signature = hmac.digest(key, text.encode(), hashlib.sha256).hex()
    return f"{url}?{parameters}&X-Amz-Signature={signature}"

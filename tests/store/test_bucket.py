"""A folder and buckets on two real S3 servers return what was put into them. A grant allows one upload."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
from blake3 import blake3

from shoal.store.folder import BucketError, DamagedFileError, FileStore, Folder, StoreError

from ..servers import S3_KEY, S3_SECRET, s3_server

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'shoal[s3]'")
from shoal.protocol.messages import UploadGrant
from shoal.store.bucket import Bucket, S3Credentials, presigned

ID, DATA = "0123456789abcdef-000001", b"rows of a submission" * 100
KEYS = S3Credentials(S3_KEY, S3_SECRET)


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str], str]]:
    """A function that returns the URL of a kind of server, and starts that server at the first call."""
    urls: dict[str, str] = {}
    with ExitStack() as running:

        def url_of(kind: str) -> str:
            urls[kind] = urls.get(kind) or running.enter_context(s3_server(kind))
            return urls[kind]

        yield url_of


def prefixed(url: str, name: str) -> Bucket:
    return Bucket(f"s3://pool/{sha256(name.encode()).hexdigest()[:8]}", url, KEYS)


@pytest.fixture(params=["rclone", "moto"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bucket(kind: str, servers: Callable[[str], str], request: pytest.FixtureRequest) -> Bucket:
    return prefixed(servers(kind), request.node.name)


@pytest.fixture(params=["folder", "rclone", "moto"])
def store(request: pytest.FixtureRequest, servers: Callable[[str], str], tmp_path: Path) -> FileStore:
    return Folder(tmp_path) if request.param == "folder" else prefixed(servers(request.param), request.node.name)


def send(grant: UploadGrant, data: bytes, **headers: str) -> httpx.Response:
    return httpx.put(grant.url, content=data, headers=grant.headers | headers)


def granted(bucket: Bucket, data: bytes = DATA, kind: str = "submissions", id: str = ID) -> UploadGrant:
    return bucket.grant(kind, id, len(data), sha256(data).hexdigest())


def kept(bucket: Bucket, data: bytes = DATA, kind: str = "submissions", id: str = ID) -> str:
    digest = sha256(data).hexdigest()
    name = bucket.check(kind, id, len(data), digest)
    bucket.keep(kind, id, digest, name)
    return name


# --- every store -----------------------------------------------------------------------------------------------------


def test_get_returns_what_was_put_under_its_hash_and_kind(store: FileStore) -> None:
    name = store.put("accepted", DATA)
    assert name == blake3(DATA).hexdigest() and store.get("accepted", name) == DATA
    assert store.put("accepted", DATA) == name
    with pytest.raises(DamagedFileError, match=f"cannot read submissions file {name[:16]}"):
        store.get("submissions", name)


@pytest.mark.parametrize("name", ["", "ab", "A" * 64, "../" + "a" * 61, "a" * 63 + "/", "a" * 64 + "\n"])
def test_a_name_that_is_not_a_hash_is_refused(store: FileStore, name: str) -> None:
    with pytest.raises(StoreError, match="is not a content hash"):
        store.get("accepted", name)


# --- the bucket ------------------------------------------------------------------------------------------------------


def test_a_file_is_uploaded_with_its_grant_and_downloaded_with_a_link(bucket: Bucket) -> None:
    assert send(granted(bucket), DATA).status_code == 200
    name = kept(bucket)
    assert name == blake3(DATA).hexdigest() and bucket.get("submissions", name) == DATA
    assert httpx.get(bucket.link("submissions", name)).content == DATA
    with pytest.raises(StoreError, match=f"the file of {ID} was not uploaded"):
        kept(bucket)  # the upload was moved


def test_a_file_of_another_size_or_content_is_refused(bucket: Bucket) -> None:
    """Either the server or `check` refuses it."""
    for other in (DATA[:-1], DATA + b"!", b"!" + DATA[1:]):
        length = {"content-length": str(len(other))}
        httpx.put(granted(bucket).url, content=other, headers=granted(bucket).headers | length)
        with pytest.raises(StoreError, match="was not uploaded|is not the announced file"):
            kept(bucket)
    assert send(granted(bucket), DATA).status_code == 200
    assert kept(bucket) == blake3(DATA).hexdigest()


def test_a_grant_allows_only_its_own_request(kind: str, bucket: Bucket) -> None:
    if kind == "moto":
        pytest.skip("moto does not verify signatures")
    grant, other = granted(bucket), granted(bucket, id="0123456789abcdef-000002")
    name = bucket.put("accepted", DATA)
    link = bucket.link("accepted", name)
    forged = [
        httpx.put(grant.url[:-1] + ("0" if grant.url[-1] != "0" else "1"), content=DATA, headers=grant.headers),
        httpx.put(grant.url.replace(ID, "0123456789abcdef-000009"), content=DATA, headers=grant.headers),
        httpx.put(grant.url, content=DATA),  # without the signed headers
        httpx.put(grant.url, content=DATA[:-1], headers=grant.headers | {"content-length": str(len(DATA) - 1)}),
        httpx.put(grant.url, content=DATA, headers=grant.headers | {"x-amz-checksum-sha256": "A" * 43 + "="}),
        httpx.put(grant.url, content=DATA, headers=grant.headers | {"if-none-match": "x"}),
        httpx.put(link, content=b"other"),
        httpx.delete(link),
        httpx.get(
            grant.url, headers={name: value for name, value in grant.headers.items() if name != "content-length"}
        ),
        httpx.get(link.replace("accepted", "submissions")),
    ]
    assert [answer.status_code for answer in forged] == [403] * len(forged)
    assert bucket.get("accepted", name) == DATA
    assert send(other, DATA).status_code == 200


def test_an_expired_grant_is_refused(kind: str, bucket: Bucket) -> None:
    if kind == "moto":
        pytest.skip("moto does not verify signatures")
    bucket.clock = lambda: time.time() - 3600
    assert send(granted(bucket), DATA).status_code in (400, 403)


def test_a_grant_does_not_overwrite_a_file(kind: str, bucket: Bucket) -> None:
    if kind == "rclone":
        pytest.skip("rclone ignores if-none-match")
    assert [send(granted(bucket), DATA).status_code for _ in range(2)] == [200, 412]
    assert kept(bucket) == blake3(DATA).hexdigest()


def test_a_file_changed_in_the_bucket_is_refused(bucket: Bucket) -> None:
    import obstore

    name = bucket.put("accepted", DATA)
    obstore.put(bucket.objects, f"{bucket.prefix}accepted/{name}.parquet", b"other")
    with pytest.raises(DamagedFileError, match=f"accepted file {name[:16]} .* was changed in the bucket"):
        bucket.get("accepted", name)


def test_a_missing_bucket_says_nothing_about_a_file(bucket: Bucket) -> None:
    name = bucket.put("accepted", DATA)
    with pytest.raises(BucketError, match="the bucket elsewhere does not exist at http"):
        Bucket("s3://elsewhere/run", bucket.host, KEYS).get("accepted", name)


@pytest.mark.parametrize("id", ["", "../x", "a/b", "x" * 201])
def test_an_id_that_could_name_another_file_is_refused(id: str) -> None:
    bucket = Bucket("s3://pool/run", "http://127.0.0.1:9", KEYS)
    with pytest.raises(StoreError, match="invalid upload"):
        granted(bucket, id=id)


def test_credentials_come_from_the_environment_and_are_not_printed() -> None:
    assert S3Credentials.read({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}) == S3Credentials("a", "b")
    with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID"):
        S3Credentials.read({})
    assert "b" * 8 not in repr(S3Credentials("a", "b" * 8, "b" * 8))


def test_a_signature_equals_the_one_in_the_example_of_aws() -> None:
    """The example is in AWS, "Authenticating Requests: Using Query Parameters"."""
    url = presigned(
        "GET",
        "https://examplebucket.s3.amazonaws.com/test.txt",
        {},
        credentials=S3Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
        region="us-east-1",
        now_s=1369353600,
        expires_s=86400,
    )
    assert url.endswith("X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404")

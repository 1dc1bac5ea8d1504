import sqlite3
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from shoal.coordinator.folder import Nonces
from shoal.ledger.connection import SqliteConnection
from shoal.protocol.identity import Identity
from shoal.protocol.signing import (
    SignatureError,
    SignedAuth,
    content_digest,
    sign_request,
    signature_base,
    verify_head,
)

from .support import signer_of

ALICE = Identity(Ed25519PrivateKey.from_private_bytes(bytes(32)))
MALLORY = Identity(Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32))
NOW_S = 1_700_000_000
REQUEST: dict[str, Any] = {"method": "POST", "path": "/submit/3", "query": "step=3&name=a%20b", "body": b"{}"}
PARAMETERS = (
    '("@method" "@path" "@query" "content-digest" "shoal-audience")'
    ';created=1700000000;nonce="0123456789abcdef"'
    ';keyid="3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29";alg="ed25519"'
)
EMPTY_DIGEST = "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:"

KNOWN_SIGNATURE = "shoal=:6ZIdXIpFtenHqremRl7dUlN3sONNz64pnrNtS/DEnxdOdTUKpEid1vEEVB7jlwg/ZM+qjp+OKVeT2JNRYZIiBg==:"


def database(path: str | Path = ":memory:") -> SqliteConnection:
    return SqliteConnection(sqlite3.connect(path, isolation_level=None))


@pytest.fixture
def nonces() -> Nonces:
    return Nonces(database())


def signed(identity: Identity = ALICE, *, nonce: str = "0123456789abcdef", **changed: Any) -> dict[str, str]:
    request = REQUEST | {"audience": "run-1", "created_s": NOW_S} | changed
    return sign_request(identity, nonce=nonce, **request)


def accept(nonces: Nonces, headers: Any, *, now_s: float = NOW_S, **changed: Any) -> str:
    request = REQUEST | {"audience": "run-1"} | changed
    target, body = f"{request['path']}?{request['query']}", request["body"]
    head = verify_head(request["method"], target, headers, audience=request["audience"], now_s=now_s)
    head.spend(nonces)
    head.check_body(sha256(body).digest(), len(body))
    return head.key


def reason(nonces: Nonces, headers: Any, **changed: Any) -> str:
    with pytest.raises(SignatureError) as caught:
        accept(nonces, headers, **changed)
    return caught.value.reason


def test_the_signature_base_is_a_known_text() -> None:
    base = signature_base("POST", "/submit/3", "step=3", EMPTY_DIGEST, "run-1", PARAMETERS)
    assert base == (
        b'"@method": POST\n'
        b'"@path": /submit/3\n'
        b'"@query": ?step=3\n'
        b'"content-digest": sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:\n'
        b'"shoal-audience": run-1\n'
        b'"@signature-params": ("@method" "@path" "@query" "content-digest" "shoal-audience")'
        b';created=1700000000;nonce="0123456789abcdef"'
        b';keyid="3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29";alg="ed25519"'
    )


def test_the_headers_of_a_request_are_known_texts() -> None:
    assert signed(query="step=3", body=b"") == {
        "content-digest": EMPTY_DIGEST,
        "shoal-audience": "run-1",
        "signature-input": f"shoal={PARAMETERS}",
        "signature": KNOWN_SIGNATURE,
    }


def test_content_digest_is_the_example_of_rfc_9530() -> None:
    digest = content_digest(b'{"hello": "world"}\n')
    assert digest == "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"method": "PUT"}, "bad signature"),
        ({"path": "/submit/4"}, "bad signature"),
        ({"query": "step=4"}, "bad signature"),
        ({"query": ""}, "bad signature"),
        ({"body": b"{ }"}, "body changed"),
        ({"audience": "run-2"}, "wrong audience"),
        ({"path": "/submit/3\n"}, "malformed"),
        ({"path": "/submit/3?step=3"}, "bad signature"),
        ({"path": "submit/3"}, "malformed"),
        ({"query": "step=3 "}, "malformed"),
        ({"method": "POST\n"}, "malformed"),
    ],
)
def test_a_changed_request_is_refused(nonces: Nonces, changed: dict[str, Any], expected: str) -> None:
    assert reason(nonces, signed(), **changed) == expected


@pytest.mark.parametrize(
    ("header", "old", "new", "expected"),
    [
        ("signature-input", "created=1700000000", "created=1700000001", "bad signature"),
        ("signature-input", "0123456789abcdef", "0123456789abcdee", "bad signature"),
        ("signature-input", ALICE.public, MALLORY.public, "bad signature"),
        ("signature-input", ALICE.public, "0" * 64, "bad signature"),
        ("signature-input", ALICE.public, ALICE.public.upper(), "malformed"),
        ("signature-input", "created=1700000000", "created=01700000000", "malformed"),
        ("signature-input", "created=1700000000", "created=-1", "malformed"),
        ("signature-input", ' "shoal-audience"', "", "malformed"),
        ("signature-input", '"@method" "@path"', '"@path" "@method"', "malformed"),
        ("signature-input", '"@method"', '"@method";req', "malformed"),
        ("signature-input", ';alg="ed25519"', "", "malformed"),
        ("signature-input", 'alg="ed25519"', 'alg="hmac-sha256"', "malformed"),
        ("signature-input", 'alg="ed25519"', 'alg="ed25519";expires=1', "malformed"),
        ("signature-input", 'alg="ed25519"', 'alg="ed25519", other=()', "malformed"),
        ("signature-input", 'alg="ed25519"', "alg=ed25519", "malformed"),
        ("signature-input", ";created=1700000000", "", "malformed"),
        ("signature-input", ";created=1700000000", ";created= 1700000000", "malformed"),
        ("signature-input", "0123456789abcdef", "short", "malformed"),
        ("signature-input", "shoal=", "sig1=", "malformed"),
        ("signature", "shoal=:", "shoal=:AA", "malformed"),
        ("signature", "shoal=", "sig1=", "malformed"),
        ("signature", "==:", "==:, other=:AAAA:", "malformed"),
        ("content-digest", "sha-256=", "sha-512=", "malformed"),
        ("shoal-audience", "run-1", "run-2", "wrong audience"),
        ("shoal-audience", "run-1", "rün", "malformed"),
    ],
)
def test_a_changed_header_is_refused(nonces: Nonces, header: str, old: str, new: str, expected: str) -> None:
    headers = signed()
    assert old in headers[header]
    headers[header] = headers[header].replace(old, new)
    assert reason(nonces, headers) == expected


def test_headers_of_another_request_or_key_are_refused(nonces: Nonces) -> None:
    assert reason(nonces, signed(audience="run-2") | {"shoal-audience": "run-1"}) == "bad signature"
    assert reason(nonces, signed() | {"content-digest": content_digest(b"[]")}, body=b"[]") == "bad signature"
    assert reason(nonces, signed() | {"signature": signed(MALLORY)["signature"]}) == "bad signature"
    assert accept(nonces, signed()) == ALICE.public, "a forged request must not spend the nonce"


def test_after_the_machine_restarts_no_request_signed_earlier_is_served(tmp_path: Path) -> None:
    """The database does not sync each row, so a power cut may lose the newest nonces."""
    first = Nonces(database(tmp_path / "nonces.db"), boot="one", now_s=NOW_S)
    assert accept(first, signed()) == ALICE.public
    first.connection.change("DELETE FROM nonces")
    same = Nonces(database(tmp_path / "nonces.db"), boot="one", now_s=NOW_S + 1)
    assert accept(same, signed(nonce="n" * 16)) == ALICE.public, "a restart of only the process must not matter"
    for now_s in (NOW_S + 5, NOW_S + 9):  # the database is opened twice in the same boot
        again = Nonces(database(tmp_path / "nonces.db"), boot="two", now_s=now_s)
        assert reason(again, signed()) == "too old"
        assert reason(again, signed(created_s=NOW_S + 5)) == "too old"
    assert accept(again, signed(created_s=NOW_S + 6)) == ALICE.public


HEADERS = ["signature", "signature-input", "content-digest", "shoal-audience"]


@pytest.mark.parametrize("name", HEADERS)
def test_a_request_without_one_of_its_headers_or_with_one_twice_is_refused(nonces: Nonces, name: str) -> None:
    assert reason(nonces, {"content-type": "application/json"}) == "unsigned"
    assert reason(nonces, {other: text for other, text in signed().items() if other != name}) == "malformed"
    pairs = [*signed().items(), (name.upper(), signed()[name])]
    assert reason(nonces, CIMultiDict(pairs)) == "malformed"
    assert reason(nonces, httpx.Headers(pairs)) in ("malformed", "wrong audience")


def test_a_request_is_served_up_to_a_minute_before_and_after_its_time() -> None:
    for age_s in (-60, 0, 60):
        assert accept(Nonces(database()), signed(), now_s=NOW_S + age_s) == ALICE.public
    assert reason(Nonces(database()), signed(), now_s=NOW_S + 60.5) == "stale"
    assert reason(Nonces(database()), signed(), now_s=NOW_S - 60.5) == "future"


def test_the_case_of_header_names_and_repeated_other_headers_do_not_matter(nonces: Nonces) -> None:
    pairs = [(name.title(), text) for name, text in signed().items()]
    assert accept(nonces, CIMultiDict([*pairs, ("accept", "a"), ("accept", "b")])) == ALICE.public


def test_a_nonce_cannot_be_reused_for_the_same_or_another_request(nonces: Nonces) -> None:
    accept(nonces, signed())
    assert reason(nonces, signed()) == "replayed"
    assert reason(nonces, signed(path="/other"), path="/other") == "replayed"
    assert accept(nonces, signed(MALLORY)) == MALLORY.public, "another key must be allowed the same nonce"


def test_old_nonces_are_purged() -> None:
    connection = database()
    nonces = Nonces(connection, keep_s=120)
    for created_s in (0, 100, 221):
        assert nonces.spend("key", f"nonce-{created_s}", created_s)
    assert connection.rows("SELECT created_s FROM nonces") == [(221,)]


def test_a_request_refused_because_a_clock_was_set_back_is_no_replay(nonces: Nonces) -> None:
    accept(nonces, signed())
    back_s = NOW_S - 3600
    with pytest.raises(SignatureError, match="too old: this server has served requests dated 3600 s later.*clock"):
        accept(nonces, signed(nonce="n" * 16, created_s=back_s), now_s=back_s)
    assert reason(nonces, signed()) == "replayed"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), max_size=40))
def test_no_nonce_is_ever_spent_twice(uses: list[tuple[int, int]]) -> None:
    nonces = Nonces(database(), keep_s=50)
    created = dict(uses)  # the signature binds a nonce to one time
    spent = []
    for nonce, _ in uses:
        with suppress(SignatureError):  # too old
            spent += [nonce] * nonces.spend("key", str(nonce), created[nonce])
    assert len(spent) == len(set(spent))


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "post"},
        {"path": "submit"},
        {"path": "/a?b"},
        {"path": "/a b"},
        {"query": "a\nb"},
        {"audience": ""},
        {"audience": "a b"},
        {"created_s": -1},
        {"nonce": "short"},
        {"nonce": 'quote"quote"quote"'},
    ],
)
def test_a_request_that_no_server_could_verify_is_not_signed(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot sign"):
        signed(**changed)


@given(name=st.sampled_from(sorted(signed())), at=st.integers(0, 400), new=st.text(max_size=3))
def test_any_edit_of_a_header_is_refused(name: str, at: int, new: str) -> None:
    headers = signed()
    text = headers[name]
    headers[name] = text[:at] + new + text[at + 1 :]
    if headers[name] == text:
        return
    with pytest.raises(SignatureError):
        accept(Nonces(database()), headers)


def server(nonces: Nonces) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        try:
            key = signer_of(request, "run-1", NOW_S, nonces)
        except SignatureError as error:
            return httpx.Response(401, text=error.reason)
        return httpx.Response(200, text=key)

    return httpx.MockTransport(answer)


@pytest.mark.parametrize("target", ["/", "", "/a%20b/ü?x=1&y=ü&z=%2F", "/a?", "/a b?c d"])
def test_client_and_server_agree_on_the_target_of_a_request(nonces: Nonces, target: str) -> None:
    with httpx.Client(transport=server(nonces), auth=SignedAuth(ALICE, "run-1", clock=lambda: NOW_S)) as client:
        assert client.get(f"http://pool{target}").text == ALICE.public


def test_a_client_signs_each_request_with_a_new_nonce(nonces: Nonces) -> None:
    auth = SignedAuth(ALICE, "run-1", clock=lambda: NOW_S + 0.9)
    with httpx.Client(transport=server(nonces), auth=auth) as client:
        answers = [client.post("http://pool/submit", json={"step": 3}, params={"a": "b c"}) for _ in range(2)]
    assert [answer.text for answer in answers] == [ALICE.public, ALICE.public]

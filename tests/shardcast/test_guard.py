"""Passes and bans, tested as functions and over HTTP."""

import asyncio
import base64
import json
import random

import aiohttp
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.files import write_file
from shoal.shardcast import guard as guard_module
from shoal.shardcast.connections import LISTENER
from shoal.shardcast.guard import PASS_S, RENEW_S, Guard, Passes, Refused, check, issue, visit
from shoal.shardcast.manifest import public_key_hex
from shoal.shardcast.server import app, serve, url_of

from .raw import request
from .support import serving

POOL = Ed25519PrivateKey.from_private_bytes(b"p" * 32)
OTHER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
POOL_KEY = public_key_hex(POOL)
ANN_KEY, BOB_KEY = (Ed25519PrivateKey.from_private_bytes(name * 32) for name in (b"a", b"b"))
ANN, BOB = public_key_hex(ANN_KEY), public_key_hex(BOB_KEY)
RUN, NOW_S = "run one", 1_000.0
HERE, ELSEWHERE = "http://relay-1:80", "http://relay-2:80"
LISTING = b'{"versions":[]}'


def make_guard() -> Guard:
    guard = Guard(audience=RUN, pool_key=POOL_KEY, clock=lambda: NOW_S)
    guard.servers = frozenset({HERE})
    return guard


def a_pass(key=ANN_KEY, *, pool=POOL, audience=RUN, expires_s=NOW_S + 600, at=HERE, created_s=NOW_S) -> str:
    return visit(key, issue(pool, public_key_hex(key), audience, expires_s), at, created_s)


def reader_of(text, *, servers=(HERE,), now_s=NOW_S) -> str:
    return check(text, POOL_KEY, RUN, servers, now_s)


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


# Passes


def test_a_pass_names_its_reader_until_its_grant_expires():
    text = a_pass(expires_s=NOW_S + 30)
    assert reader_of(text, now_s=NOW_S + 29.9) == ANN
    with pytest.raises(Refused, match="grant expired"):
        reader_of(text, now_s=NOW_S + 30)


def test_a_pass_is_refused_by_any_other_server():
    text = a_pass(at=HERE)
    for other in (ELSEWHERE, "http://origin:80", HERE + "0"):
        with pytest.raises(Refused, match="another server"):
            reader_of(text, servers=(other,))
    assert reader_of(text, servers=(ELSEWHERE, HERE)) == ANN


def test_a_pass_is_valid_up_to_pass_s_before_and_after_its_date():
    for now_s in (NOW_S - PASS_S - 1, NOW_S + PASS_S + 1):
        with pytest.raises(Refused, match="check the clock"):
            reader_of(a_pass(), now_s=now_s)
    assert reader_of(a_pass(), now_s=NOW_S + PASS_S) == reader_of(a_pass(), now_s=NOW_S - PASS_S) == ANN


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (a_pass(audience="run two"), "this is"),
        (a_pass(pool=OTHER), "the pool did not sign"),
        # A relay sees the grants of all its readers. Without the readers' keys it cannot turn a grant into a pass.
        (issue(POOL, ANN, RUN, NOW_S + 600), "malformed"),
        (visit(BOB_KEY, issue(POOL, ANN, RUN, NOW_S + 600), HERE, NOW_S), "the reader did not sign"),
    ],
    ids=["another run", "another pool", "a grant alone", "another reader's signature"],
)
def test_a_pass_that_is_not_for_this_reader_run_and_pool_is_refused(text, reason):
    with pytest.raises(Refused, match=reason):
        reader_of(text)


def test_a_pass_changed_anywhere_is_refused():
    text = a_pass()
    for place in range(len(text)):
        changed = text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :]
        with pytest.raises(Refused):
            reader_of(changed)


def test_other_messages_signed_by_these_keys_are_refused_as_parts_of_a_pass():
    grant, _, visited = a_pass().partition("~")
    for domain in (b"", b"shoal shardcast manifest 5\n", guard_module.VISIT_DOMAIN):
        text = base64.urlsafe_b64decode(grant.partition(".")[0] + "==")
        with pytest.raises(Refused, match="signature"):
            reader_of(f"{grant.partition('.')[0]}.{POOL.sign(domain + text).hex()}~{visited}")
    for domain in (b"", guard_module.GRANT_DOMAIN):
        text = base64.urlsafe_b64decode(visited.partition(".")[0] + "==")
        with pytest.raises(Refused, match="signature"):
            reader_of(f"{grant}~{visited.partition('.')[0]}.{ANN_KEY.sign(domain + text).hex()}")


@pytest.mark.parametrize("text", ["", ".", "~", "a.b~c.d", "ä." + "0" * 128, "A." + "0" * 128, "A" * 10_000])
def test_malformed_passes_are_refused(text):
    for whole in (text, f"{text}~{a_pass().partition('~')[2]}", f"{a_pass().partition('~')[0]}~{text}"):
        with pytest.raises(Refused):
            reader_of(whole)


def test_a_grant_names_its_reader_by_a_key():
    with pytest.raises(ValueError):
        issue(POOL, "ann", RUN, NOW_S)


def test_a_reader_signs_a_pass_for_each_server_and_renews_it_if_grant_or_time_change():
    now_s, grant = NOW_S, ""
    passes = Passes(ANN_KEY, lambda: grant, lambda: now_s)
    assert passes(HERE) == "", "without a grant, the pass must be empty"
    grant = issue(POOL, ANN, RUN, NOW_S + 600)
    first = passes(HERE)
    assert reader_of(first) == ANN and passes(HERE) == first
    assert reader_of(passes(ELSEWHERE + "/"), servers=(ELSEWHERE,)) == ANN
    now_s = NOW_S + RENEW_S
    assert passes(HERE) != first and reader_of(passes(HERE), now_s=now_s) == ANN
    now_s = NOW_S  # the clock is set back
    before = passes(HERE)
    assert reader_of(before) == ANN
    grant = issue(POOL, ANN, RUN, NOW_S + 900)  # the pool sends a new grant
    assert passes(HERE) != before and reader_of(passes(HERE)) == ANN


def test_the_signature_of_a_pass_is_verified_once(monkeypatch):
    text = a_pass()
    reader_of(text)
    monkeypatch.setattr(guard_module, "_verified", None)
    assert reader_of(text) == ANN
    with pytest.raises(Refused):
        reader_of(text, now_s=NOW_S + 2 * PASS_S)


# Over HTTP


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Basic QTpC"}, bearer(""), bearer("nonsense"), bearer(a_pass(pool=OTHER))],
    ids=["none", "basic", "empty", "nonsense", "forged"],
)
async def test_only_health_is_served_without_a_valid_pass(tmp_path, headers):
    write_file(tmp_path / "versions.json", LISTING)
    async with serving(tmp_path, guard=make_guard()) as url:
        for path in ("/versions.json", "/v000007/manifest.json", "/v000007/full/00000.shard", "/nothing"):
            status, answer_headers, body = await request(url + path, headers=headers)
            assert (status, answer_headers["WWW-Authenticate"]) == (401, "Bearer")
            assert LISTING not in body
        status, _, body = await request(f"{url}/healthz", headers=headers)
    assert status == 200 and json.loads(body)["requests_refused"] == 4


async def test_only_requests_with_a_valid_pass_keep_their_connection(tmp_path):
    """If refused requests kept it, strangers could occupy all connections with one request a minute each."""
    write_file(tmp_path / "versions.json", LISTING)
    guard = make_guard()
    guard.ban({BOB})
    application = app(tmp_path, guard=guard)
    runner, port = await serve(application, shutdown_s=0.05)
    url, listener = url_of("127.0.0.1", port), application[LISTENER]
    async with aiohttp.ClientSession() as session:
        for path, headers, status in (
            ("versions.json", {}, 401),
            ("versions.json", bearer(a_pass(BOB_KEY)), 403),
            ("healthz", {}, 200),
            ("versions.json", bearer(a_pass(ANN_KEY)), 200),
        ):
            async with session.get(f"{url}/{path}", headers=headers) as response:
                await response.read()
                kept = response.headers.get("Connection") != "close"
                assert (response.status, kept) == (status, headers == bearer(a_pass(ANN_KEY)))
        assert [(each.requested, each.reader) for each in listener.open.values()] == [(True, ANN)]
    await runner.cleanup()


async def test_bans_take_effect_at_once_and_cannot_be_set_over_http(tmp_path):
    write_file(tmp_path / "versions.json", LISTING)
    guard = make_guard()
    async with serving(tmp_path, guard=guard) as url:

        async def statuses() -> list[int]:
            passes = (bearer(a_pass(key)) for key in (ANN_KEY, BOB_KEY))
            return [(await request(f"{url}/versions.json", headers=headers))[0] for headers in passes]

        for banned, expected in ((set(), [200, 200]), ({ANN}, [403, 200]), (set(), [200, 200])):
            guard.ban(banned)
            assert await statuses() == expected
        assert (await request(f"{url}/readers", method="PUT", headers=bearer(a_pass()), data=b"{}"))[0] == 404


async def test_a_ban_resets_the_readers_transfers(tmp_path):
    data = random.Random(0).randbytes(32 << 20)  # more than the socket buffers hold
    write_file(tmp_path / "versions.json", data)
    guard = make_guard()
    async with (
        serving(tmp_path, guard=guard) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/versions.json", headers=bearer(a_pass(ANN_KEY))) as ann,
        session.get(f"{url}/versions.json", headers=bearer(a_pass(BOB_KEY))) as bob,
    ):
        guard.ban({ANN})
        with pytest.raises(aiohttp.ClientError):
            await asyncio.wait_for(ann.read(), 30)
        assert await asyncio.wait_for(bob.read(), 30) == data


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:80", 200),
        ("[::1]", 200),
        ("relay-1", 200),
        ("evil.example", 421),
        ("evil.example:80", 421),
        ("evil.example.", 421),
    ],
)
async def test_a_name_of_another_host_gets_no_answer_over_loopback(tmp_path, host, status):
    """Another site's page may point its own name at this machine (DNS rebinding)."""
    async with serving(tmp_path / "store", guard=make_guard()) as url, aiohttp.ClientSession() as session:
        answer = await session.get(f"{url}/healthz", headers={"Host": host})
        assert answer.status == status

"""Passes and bans: as functions, and over HTTP."""

import asyncio
import base64
import json
import random

import aiohttp
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.files import write_file
from shoal.shardcast import guard as guard_module
from shoal.shardcast.guard import PASS_S, RENEW_S, Guard, Passes, Refused, check, issue, visit
from shoal.shardcast.manifest import public_key_hex
from shoal.shardcast.server import app, serve

POOL = Ed25519PrivateKey.from_private_bytes(b"p" * 32)
OTHER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
POOL_KEY = public_key_hex(POOL)
ANN_KEY, BOB_KEY = (Ed25519PrivateKey.from_private_bytes(name * 32) for name in (b"a", b"b"))
ANN, BOB = public_key_hex(ANN_KEY), public_key_hex(BOB_KEY)
RUN, NOW_S = "run one", 1_000.0
HERE, ELSEWHERE = "http://relay-1:80", "http://relay-2:80"
LISTING = b'{"versions":[]}'


def guard(**options) -> Guard:
    found = Guard(audience=RUN, pool_key=POOL_KEY, clock=lambda: NOW_S, **options)
    found.servers = frozenset({HERE})
    return found


def shown(key=ANN_KEY, *, pool=POOL, audience=RUN, expires_s=NOW_S + 600, at=HERE, created_s=NOW_S) -> str:
    return visit(key, issue(pool, public_key_hex(key), audience, expires_s), at, created_s)


def opens(text, *, servers=(HERE,), now_s=NOW_S) -> str:
    return check(text, POOL_KEY, RUN, servers, now_s)


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def asking(tmp_path, doorman: Guard, questions):
    """What `questions(ask)` returns, where `ask(method, path, headers, data)` gives (status, headers, body)."""
    write_file(tmp_path / "versions.json", LISTING)

    async def main():
        runner, port = await serve(app(tmp_path, guard=doorman), shutdown_s=0.05)

        async def ask(path="/versions.json", headers=None, method="GET", data=None):
            url = f"http://127.0.0.1:{port}{path}"
            async with session.request(method, url, headers=headers, data=data) as response:
                return response.status, response.headers, await response.read()

        try:
            async with aiohttp.ClientSession() as session:
                return await questions(ask)
        finally:
            await runner.cleanup()

    return asyncio.run(main())


# Passes


def test_a_pass_names_its_reader_until_its_grant_expires():
    text = shown(expires_s=NOW_S + 30)
    assert opens(text, now_s=NOW_S + 29.9) == ANN
    with pytest.raises(Refused, match="grant expired"):
        opens(text, now_s=NOW_S + 30)


def test_what_a_relay_was_shown_opens_no_other_server():
    text = shown(at=HERE)
    for other in (ELSEWHERE, "http://origin:80", HERE + "0"):
        with pytest.raises(Refused, match="another server"):
            opens(text, servers=(other,))
    assert opens(text, servers=(ELSEWHERE, HERE)) == ANN


def test_what_a_relay_was_shown_is_soon_worth_nothing():
    for now_s in (NOW_S - PASS_S - 1, NOW_S + PASS_S + 1):
        with pytest.raises(Refused, match="check the clock"):
            opens(shown(), now_s=now_s)
    assert opens(shown(), now_s=NOW_S + PASS_S) == opens(shown(), now_s=NOW_S - PASS_S) == ANN


def test_a_grant_alone_opens_nothing():
    """A relay holds the grants of all its readers. Without their keys it can make no pass of them."""
    grant = issue(POOL, ANN, RUN, NOW_S + 600)
    with pytest.raises(Refused, match="malformed"):
        opens(grant)
    with pytest.raises(Refused, match="the reader did not sign"):
        opens(visit(BOB_KEY, grant, HERE, NOW_S))


def test_a_pass_for_another_run_is_refused():
    with pytest.raises(Refused, match="this is"):
        opens(shown(audience="run two"))


def test_a_grant_that_the_pool_did_not_sign_is_refused():
    with pytest.raises(Refused, match="the pool did not sign"):
        opens(shown(pool=OTHER))


def test_a_pass_changed_anywhere_is_refused():
    text = shown()
    for place in range(len(text)):
        changed = text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :]
        with pytest.raises(Refused):
            opens(changed)


def test_what_a_key_signed_as_something_else_is_no_part_of_a_pass():
    grant, _, visited = shown().partition("~")
    for domain in (b"", b"shoal shardcast manifest 5\n", guard_module.VISIT_DOMAIN):
        text = base64.urlsafe_b64decode(grant.partition(".")[0] + "==")
        with pytest.raises(Refused, match="signature"):
            opens(f"{grant.partition('.')[0]}.{POOL.sign(domain + text).hex()}~{visited}")
    for domain in (b"", guard_module.GRANT_DOMAIN):
        text = base64.urlsafe_b64decode(visited.partition(".")[0] + "==")
        with pytest.raises(Refused, match="signature"):
            opens(f"{grant}~{visited.partition('.')[0]}.{ANN_KEY.sign(domain + text).hex()}")


@pytest.mark.parametrize("text", ["", ".", "~", "a.b~c.d", "ä." + "0" * 128, "A." + "0" * 128, "A" * 10_000])
def test_malformed_passes_are_refused(text):
    for whole in (text, f"{text}~{shown().partition('~')[2]}", f"{shown().partition('~')[0]}~{text}"):
        with pytest.raises(Refused):
            opens(whole)


def test_a_reader_is_named_by_a_key():
    with pytest.raises(ValueError):
        issue(POOL, "ann", RUN, NOW_S)


def test_a_reader_signs_a_pass_for_each_server_and_renews_it_in_time():
    now_s, grant = NOW_S, ""
    made = Passes(ANN_KEY, lambda: grant, lambda: now_s)
    assert made(HERE) == "", "nothing was granted yet"
    grant = issue(POOL, ANN, RUN, NOW_S + 600)
    first = made(HERE)
    assert opens(first) == ANN and made(HERE) == first
    assert opens(made(ELSEWHERE + "/"), servers=(ELSEWHERE,)) == ANN
    now_s = NOW_S + RENEW_S
    assert made(HERE) != first and opens(made(HERE), now_s=now_s) == ANN
    now_s = NOW_S  # the clock was set back
    before = made(HERE)
    assert opens(before) == ANN
    grant = issue(POOL, ANN, RUN, NOW_S + 900)  # the pool granted another time
    assert made(HERE) != before and opens(made(HERE)) == ANN


def test_a_pass_that_came_before_costs_no_signature_check(monkeypatch):
    text = shown()
    opens(text)
    monkeypatch.setattr(guard_module, "_verified", None)
    assert opens(text) == ANN
    with pytest.raises(Refused):
        opens(text, now_s=NOW_S + 2 * PASS_S)


# Who may read


def test_readers_with_a_pass_read(tmp_path):
    async def questions(ask):
        return await ask(headers=bearer(shown()))

    assert asking(tmp_path, guard(), questions)[::2] == (200, LISTING)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Basic QTpC"},
        bearer(""),
        bearer("nonsense"),
        bearer(shown(expires_s=NOW_S - 1)),
        bearer(shown(pool=OTHER)),
        bearer(shown(audience="run two")),
        bearer(shown(at=ELSEWHERE)),
        bearer(issue(POOL, ANN, RUN, NOW_S + 600)),
    ],
    ids=["none", "basic", "empty", "nonsense", "expired", "forged", "another run's", "another server's", "a grant"],
)
def test_nothing_but_health_is_answered_without_a_good_pass(tmp_path, headers):
    async def questions(ask):
        paths = ("/versions.json", "/v000007/manifest.json", "/v000007/full/00000.shard", "/nothing")
        return [await ask(path, headers) for path in paths], await ask("/healthz", headers)

    answers, health = asking(tmp_path, guard(), questions)
    for status, headers, body in answers:
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert LISTING not in body
    assert health[0] == 200
    assert json.loads(health[2])["requests_refused"] == 4


def test_everyone_reads_without_a_pool_key(tmp_path):
    async def questions(ask):
        return (await ask())[0]

    assert asking(tmp_path, Guard(audience=RUN), questions) == 200


def test_nobody_can_push_bans_over_http(tmp_path):
    async def questions(ask):
        return (await ask("/readers", bearer(shown()), "PUT", b"{}"))[0]

    assert asking(tmp_path, guard(), questions) == 404


# Bans


def test_a_ban_takes_effect_at_once_and_so_does_its_end(tmp_path):
    doorman = guard()

    async def questions(ask):
        statuses = []
        for banned in (set(), {ANN}, set()):
            doorman.ban(banned)
            statuses.append([(await ask(headers=bearer(shown(reader))))[0] for reader in (ANN_KEY, BOB_KEY)])
        return statuses

    assert asking(tmp_path, doorman, questions) == [[200, 200], [403, 200], [200, 200]]


def test_a_ban_cuts_what_a_reader_is_receiving(tmp_path):
    data = random.Random(0).randbytes(32 << 20)  # more than the kernels hold between the two
    write_file(tmp_path / "versions.json", data)

    async def main():
        doorman = guard()
        runner, port = await serve(app(tmp_path, guard=doorman), shutdown_s=0.05)
        url = f"http://127.0.0.1:{port}/versions.json"
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(url, headers=bearer(shown(ANN_KEY))) as ann,
                session.get(url, headers=bearer(shown(BOB_KEY))) as bob,
            ):
                doorman.ban({ANN})
                with pytest.raises(aiohttp.ClientError):
                    await asyncio.wait_for(ann.read(), 30)
                return await asyncio.wait_for(bob.read(), 30)
        finally:
            await runner.cleanup()

    assert asyncio.run(main()) == data

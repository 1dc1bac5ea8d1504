"""Tokens, bans and rates: as functions, and over HTTP."""

import asyncio
import base64
import json
import random

import aiohttp
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.files import write_file
from shoal.shardcast.format.manifest import public_key_hex
from shoal.shardcast.serve.guard import Guard, Refused, check, issue
from shoal.shardcast.serve.rates import Rates
from shoal.shardcast.serve.server import app, serve

POOL = Ed25519PrivateKey.from_private_bytes(b"p" * 32)
OTHER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
POOL_KEY = public_key_hex(POOL)
ANN, BOB = "a" * 64, "b" * 64
RUN, NOW_S = "run one", 1_000.0
LISTING = b'{"versions":[]}'


def guard(**options) -> Guard:
    return Guard(audience=RUN, pool_key=POOL_KEY, clock=lambda: NOW_S, **options)


def token(reader=ANN, *, key=POOL, audience=RUN, expires_s=NOW_S + 60) -> str:
    return issue(key, reader, audience, expires_s)


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


# Tokens


def test_a_token_names_its_reader_until_it_expires():
    text = token()
    assert check(text, POOL_KEY, RUN, NOW_S + 59.9) == ANN
    with pytest.raises(Refused, match="expired"):
        check(text, POOL_KEY, RUN, NOW_S + 60)


def test_a_token_for_another_run_is_refused():
    with pytest.raises(Refused, match="this is"):
        check(token(audience="run two"), POOL_KEY, RUN, NOW_S)


def test_a_token_that_the_pool_did_not_sign_is_refused():
    with pytest.raises(Refused, match="signature"):
        check(token(key=OTHER), POOL_KEY, RUN, NOW_S)


def test_a_token_changed_anywhere_is_refused():
    text = token()
    for place in range(len(text)):
        changed = text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :]
        with pytest.raises(Refused):
            check(changed, POOL_KEY, RUN, NOW_S)


def test_what_the_pool_signed_as_something_else_is_not_a_token():
    text = base64.urlsafe_b64decode(token().partition(".")[0] + "==")
    for domain in (b"", b"shoal shardcast manifest 3\n"):
        forged = f"{token().partition('.')[0]}.{POOL.sign(domain + text).hex()}"
        with pytest.raises(Refused, match="signature"):
            check(forged, POOL_KEY, RUN, NOW_S)


@pytest.mark.parametrize("text", ["", ".", "a.b", "ä." + "0" * 128, "A." + "0" * 128, "A" * 10_000, "e30." + "0" * 127])
def test_malformed_tokens_are_refused(text):
    with pytest.raises(Refused):
        check(text, POOL_KEY, RUN, NOW_S)


def test_a_reader_is_named_by_a_key():
    with pytest.raises(ValueError):
        token(reader="ann")


# Who may read


def test_readers_with_a_token_read(tmp_path):
    async def questions(ask):
        return await ask(headers=bearer(token()))

    assert asking(tmp_path, guard(), questions)[::2] == (200, LISTING)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Basic QTpC"},
        bearer(""),
        bearer("nonsense"),
        bearer(token(expires_s=NOW_S - 1)),
        bearer(token(key=OTHER)),
        bearer(token(audience="run two")),
    ],
    ids=["none", "basic", "empty", "nonsense", "expired", "forged", "another run's"],
)
def test_nothing_but_health_is_answered_without_a_good_token(tmp_path, headers):
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
        return (await ask("/readers", bearer(token(POOL_KEY)), "PUT", b"{}"))[0]

    assert asking(tmp_path, guard(), questions) == 404


# Bans


def test_a_ban_takes_effect_at_once_and_so_does_its_end(tmp_path):
    doorman = guard()

    async def questions(ask):
        statuses = []
        for banned in (set(), {ANN}, set()):
            doorman.ban(banned)
            statuses.append([(await ask(headers=bearer(token(reader))))[0] for reader in (ANN, BOB)])
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
                session.get(url, headers=bearer(token(ANN))) as ann,
                session.get(url, headers=bearer(token(BOB))) as bob,
            ):
                doorman.ban({ANN})
                with pytest.raises(aiohttp.ClientError):
                    await asyncio.wait_for(ann.read(), 30)
                return await asyncio.wait_for(bob.read(), 30)
        finally:
            await runner.cleanup()

    assert asyncio.run(main()) == data


# Rates


def test_a_client_waits_once_it_is_ahead_by_more_than_a_burst():
    rates = Rates(100.0)
    rates.charge("ann", 1_000, 0.0)  # ten seconds' worth: the burst
    assert rates.wait_s("ann", 0.0) == 0
    rates.charge("ann", 500, 0.0)
    assert rates.wait_s("ann", 0.0) == 5
    assert rates.wait_s("ann", 3.0) == 2
    assert rates.wait_s("ann", 5.0) == 0
    assert rates.wait_s("bob", 0.0) == 0


def test_a_client_saves_nothing_up():
    rates = Rates(100.0)
    rates.charge("ann", 100, 0.0)
    rates.charge("ann", 2_000, 1_000.0)
    assert rates.wait_s("ann", 1_000.0) == 10


def test_the_least_recent_clients_are_forgotten():
    rates = Rates(1.0, clients=3)
    for client in ("ann", "bob", "cy", "ann", "dee"):
        rates.charge(client, 100, 0.0)
    assert [client for client in ("ann", "bob", "cy", "dee") if rates.wait_s(client, 0.0)] == ["ann", "cy", "dee"]


@pytest.mark.parametrize("public", [False, True])
def test_a_client_over_its_rate_is_told_when_to_come_back(tmp_path, public):
    options = {"rate_Bps": 1.0, "monotonic": lambda: 0.0}
    doorman = Guard(audience=RUN, **options) if public else guard(**options)

    async def questions(ask):
        answers = [await ask(headers=bearer(token())) for _ in range(2)]  # 15 bytes; a burst is 10
        return answers, (await ask(headers=bearer(token(BOB))))[0], (await ask("/healthz"))[0]

    (first, second), other, health = asking(tmp_path, doorman, questions)
    assert (first[0], second[0], second[1]["Retry-After"]) == (200, 429, "5")
    assert (other, health) == (429 if public else 200, 200)

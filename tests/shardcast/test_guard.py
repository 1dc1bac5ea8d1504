"""Tokens, updates and rates: as functions, and over HTTP."""

import asyncio
import json
import random

import aiohttp
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.files import write_file
from shoal.shardcast.format.manifest import public_key_hex
from shoal.shardcast.serve import guard as guarding
from shoal.shardcast.serve.guard import Guard, Refused, check, issue, issue_update
from shoal.shardcast.serve.rates import Rates
from shoal.shardcast.serve.server import app, serve

POOL = Ed25519PrivateKey.from_private_bytes(b"p" * 32)
OTHER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
POOL_KEY = public_key_hex(POOL)
ANN, BOB = "a" * 64, "b" * 64
RUN, NOW_S = "run one", 1_000.0
LISTING = b'{"versions":[]}'
EVERYONE = frozenset[str]()


def guard(readers=None, **options) -> Guard:
    return Guard(readers, audience=RUN, pool_key=POOL_KEY, clock=lambda: NOW_S, **options)


def token(reader=ANN, *, key=POOL, audience=RUN, expires_s=NOW_S + 60) -> str:
    return issue(key, reader, audience, expires_s)


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def asking(tmp_path, doorman: Guard, questions):
    """What `questions(ask)` returns, where `ask(method, path, headers, data)` gives (status, headers, body)."""
    write_file(tmp_path / "versions.json", LISTING)

    async def main():
        runner, port = await serve(app(tmp_path, guard=doorman))

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


def test_what_the_pool_signed_as_something_else_is_no_token():
    fields = guarding.ReaderToken(reader=ANN, audience=RUN, expires_s=NOW_S + 60)
    for domain in (b"", guarding.UPDATE_DOMAIN):
        with pytest.raises(Refused, match="signature"):
            check(guarding._seal(POOL, domain, fields), POOL_KEY, RUN, NOW_S)


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
    for status, told, body in answers:
        assert (status, told["WWW-Authenticate"]) == (401, "Bearer")
        assert LISTING not in body
    assert health[0] == 200
    assert json.loads(health[2])["requests_refused"] == 4


def test_only_readers_of_the_run_read_where_they_are_named(tmp_path):
    async def questions(ask):
        return [(await ask(headers=bearer(token(reader))))[0] for reader in (ANN, BOB)]

    assert asking(tmp_path, guard(frozenset({ANN})), questions) == [200, 403]


def test_everyone_reads_where_there_is_no_pool_key(tmp_path):
    async def questions(ask):
        body = issue_update(POOL, RUN, 1, allowed=None, banned=frozenset({ANN}))
        return (await ask())[0], (await ask("/readers", method="PUT", data=body))[0]

    assert asking(tmp_path, Guard(None, audience=RUN), questions) == (200, 403)


def test_readers_cannot_be_told_apart_without_a_pool_key():
    with pytest.raises(ValueError, match="pool_key"):
        Guard(frozenset({ANN}), audience=RUN)


# Updates


def push(ask, body: bytes, *, by=POOL_KEY):
    return ask("/readers", bearer(token(by)), "PUT", body)


def test_a_pushed_ban_takes_effect_at_once_and_so_does_its_end(tmp_path):
    async def questions(ask):
        statuses = []
        for serial, banned in enumerate((EVERYONE, frozenset({ANN}), EVERYONE), start=1):
            body = issue_update(POOL, RUN, serial, allowed=None, banned=banned)
            assert (await push(ask, body))[0] == 200
            statuses.append([(await ask(headers=bearer(token(reader))))[0] for reader in (ANN, BOB)])
        return statuses

    assert asking(tmp_path, guard(), questions) == [[200, 200], [403, 200], [200, 200]]


@pytest.mark.parametrize(
    "lists",
    [{"allowed": None, "banned": frozenset({ANN})}, {"allowed": frozenset({BOB}), "banned": EVERYONE}],
    ids=["banned", "no longer allowed"],
)
def test_a_pushed_update_ends_what_a_reader_was_receiving(tmp_path, lists):
    data = random.Random(0).randbytes(32 << 20)  # more than the kernels hold between the two
    write_file(tmp_path / "versions.json", data)

    async def main():
        doorman = guard()
        runner, port = await serve(app(tmp_path, guard=doorman))
        url = f"http://127.0.0.1:{port}"
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{url}/versions.json", headers=bearer(token(ANN))) as ann,
                session.get(f"{url}/versions.json", headers=bearer(token(BOB))) as bob,
            ):
                update = issue_update(POOL, RUN, 1, **lists)
                async with session.put(f"{url}/readers", headers=bearer(token(POOL_KEY)), data=update) as pushed:
                    assert pushed.status == 200
                with pytest.raises(aiohttp.ClientError):
                    await asyncio.wait_for(ann.read(), 10)
                return await asyncio.wait_for(bob.read(), 10)
        finally:
            await runner.cleanup()

    assert asyncio.run(main()) == data


def test_a_pushed_list_of_readers_replaces_the_first_and_does_not_lock_out_the_pool(tmp_path):
    async def questions(ask):
        await push(ask, issue_update(POOL, RUN, 1, allowed=frozenset({BOB}), banned=EVERYONE))
        statuses = [(await ask(headers=bearer(token(reader))))[0] for reader in (ANN, BOB)]
        return statuses, (await push(ask, issue_update(POOL, RUN, 2, allowed=None, banned=EVERYONE)))[0]

    assert asking(tmp_path, guard(frozenset({ANN})), questions) == ([403, 200], 200)


def test_an_update_replayed_older_forged_or_for_another_run_changes_nothing(tmp_path):
    ban = frozenset({ANN})
    first = issue_update(POOL, RUN, 5, allowed=None, banned=EVERYONE)
    refused = [
        first,
        issue_update(POOL, RUN, 4, allowed=None, banned=ban),
        issue_update(OTHER, RUN, 6, allowed=None, banned=ban),
        issue_update(POOL, "run two", 6, allowed=None, banned=ban),
        token().encode(),
        b"\xff" * 1000,
        b"",
    ]

    async def questions(ask):
        assert (await push(ask, first))[0] == 200
        answers = [(await push(ask, body))[0] for body in refused]
        return answers, (await ask(headers=bearer(token())))[0]

    assert asking(tmp_path, guard(), questions) == ([409] * len(refused), 200)


def test_nobody_but_the_pool_gets_an_update_read_and_not_more_than_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(guarding, "MAX_UPDATE_BYTES", 1000)
    update = issue_update(POOL, RUN, 1, allowed=None, banned=EVERYONE)

    async def questions(ask):
        return [
            (await ask("/readers", None, "PUT", update))[0],
            (await push(ask, update, by=ANN))[0],
            (await push(ask, b"x" * 2000))[0],
            (await push(ask, update))[0],
        ]

    assert asking(tmp_path, guard(), questions) == [401, 403, 413, 200]


def test_the_last_update_outlives_the_process(tmp_path):
    state = tmp_path / "readers"
    earlier = issue_update(POOL, RUN, 1, allowed=None, banned=EVERYONE).decode()
    guard(state=state).accept(issue_update(POOL, RUN, 2, allowed=None, banned=frozenset({ANN})).decode())
    again = guard(state=state)
    assert again.banned == {ANN}
    with pytest.raises(Refused, match="not newer"):
        again.accept(earlier)


def test_the_state_of_another_pool_is_refused(tmp_path):
    write_file(tmp_path / "readers", issue_update(OTHER, RUN, 2, allowed=None, banned=EVERYONE))
    with pytest.raises(Refused):
        guard(state=tmp_path / "readers")


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
    doorman = Guard(None, audience=RUN, rate_Bps=1.0) if public else guard(rate_Bps=1.0)

    async def questions(ask):
        answers = [await ask(headers=bearer(token())) for _ in range(2)]  # 15 bytes; a burst is 10
        return answers, (await ask(headers=bearer(token(BOB))))[0], (await ask("/healthz"))[0]

    (first, second), other, health = asking(tmp_path, doorman, questions)
    assert (first[0], second[0], second[1]["Retry-After"]) == (200, 429, "5")
    assert (other, health) == (429 if public else 200, 200)

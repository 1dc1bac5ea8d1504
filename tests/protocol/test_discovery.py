"""The list of runs at a listener that is a function: what of it is believed."""

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import httpx
import pytest

from shoal.protocol import discovery
from shoal.protocol.answers import sign_answer
from shoal.protocol.discovery import DOMAIN, DiscoveryError, FoundRuns, find_runs
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.messages import VERSION, RunList

from ..cli.test_discover import OWNER, offer

OTHER = Identity.generate()


def found(
    *,
    protocol: int = VERSION,
    signer: Identity = OWNER,
    list_signer: Identity = OWNER,
    domain: str = DOMAIN,
    key: str = "",
    **changed: Any,
) -> FoundRuns:
    """What `find_runs` makes of a list with one offer; `signer` signs the answer, `list_signer` the list."""

    def listener(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == "http://h:1/runs"
        listed = RunList(protocol=protocol, runs=[offer("sums", **changed)])
        body = Signed.make(list_signer, listed.model_dump_json(), domain=domain).model_dump_json().encode()
        answer = {"status": 200, "body_sha256": sha256(body).digest(), "created_s": 1}
        return httpx.Response(200, content=body, headers=sign_answer(signer, request.headers, **answer))

    return find_runs("http://h:1/runs/sums", client(listener), key)


def client(listener: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(listener))


def test_a_list_is_read_from_the_listener_of_a_runs_url() -> None:
    assert [one.place for one in found().runs.runs] == ["sums"] and found().url == "http://h:1"
    assert found(key=OWNER.public).key == OWNER.public


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"protocol": VERSION + 1}, f"speaks protocol {VERSION + 1}, this machine {VERSION}: install its version"),
        ({"requirements": {"memory_gib": 8, "magic": 1}}, "is not a list of runs of this version"),
        ({"key": OTHER.public}, "cannot be trusted: "),
        ({"signer": OTHER}, "cannot be trusted: "),
        ({"list_signer": OTHER}, "cannot be trusted: "),
        ({"domain": "run"}, "cannot be trusted: the signature of "),
        ({"signer": OTHER, "list_signer": OTHER, "key": OWNER.public}, "cannot be trusted: "),
    ],
)
def test_what_is_not_believed(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(DiscoveryError, match=words):
        found(**changed)


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (httpx.Response(404, text="nothing"), "answers 404: no Shoal coordinator"),
        (httpx.Response(200, stream=httpx.ByteStream(b"x"), headers={"content-encoding": "gzip"}), "answers in gzip"),
        (httpx.Response(200, content=bytes(101)), "more than 100 bytes; tell its operator"),
        (httpx.Response(200, content=b"{}"), "not a list of runs"),
    ],
)
def test_what_is_no_list(response: httpx.Response, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "MOST_BYTES", 100)
    with pytest.raises(DiscoveryError, match=words):
        find_runs("http://h:1", client(lambda request: response))


def test_a_listener_that_is_away_is_named() -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(DiscoveryError, match="nothing answers at http://h:1 .refused."):
        find_runs("http://h:1", client(away))

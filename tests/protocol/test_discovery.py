"""The offer of a run whose coordinator is a function: what of it is believed."""

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import httpx
import pytest

from shoal.config.sections import RequirementsSection
from shoal.errors import ShoalError
from shoal.protocol import history
from shoal.protocol.history import find_run, open_invite
from shoal.protocol.identity import Identity
from shoal.protocol.invite import make_invite, run_id
from shoal.protocol.messages import VERSION, RunOffer
from shoal.protocol.signing import sign_answer

URL = "http://h:1"
OWNER, OTHER = Identity.generate(), Identity.generate()
RUN = run_id("sums", OWNER.public)


def offer(**changed: Any) -> RunOffer:
    fields: dict[str, Any] = {
        "protocol": VERSION,
        "run": RUN,
        "key": OWNER.public,
        "model": "bundled:tiny",
        "state": "running",
        "step": 3,
        "steps": 24,
        "workers": 2,
        "places_free": None,
        "requirements": RequirementsSection().model_dump(),
    }
    return RunOffer(**fields | changed)


def client(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(answer))


def signed(request: httpx.Request, body: bytes, signer: Identity = OWNER) -> httpx.Response:
    answer = {"status": 200, "body_sha256": sha256(body).digest(), "created_s": 1}
    return httpx.Response(200, content=body, headers=sign_answer(signer, request.headers, **answer))


def found(*, signer: Identity = OWNER, trusted: str = "", **changed: Any) -> RunOffer:
    """What `find_run` makes of an offer; `signer` signs the answer."""

    def coordinator(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == f"{URL}/v1/offer"
        return signed(request, offer(**changed).model_dump_json().encode(), signer)

    return find_run(f"{URL}/", client(coordinator), trusted)


def test_an_offer_is_believed_with_its_coordinators_signature() -> None:
    assert found() == found(trusted=OWNER.public) == offer()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"protocol": VERSION + 1}, f"speaks protocol {VERSION + 1}, this machine {VERSION}: install its version"),
        ({"requirements": {"places": 8, "magic": 1}}, "is no offer of this version"),
        ({"signer": OTHER}, "cannot be trusted: "),
        ({"signer": OTHER, "key": OTHER.public, "trusted": OWNER.public}, "cannot be trusted: "),
    ],
)
def test_what_is_not_believed(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ShoalError, match=words):
        found(**changed)


def test_an_offer_that_somebody_changed_or_kept_is_not_believed() -> None:
    kept: list[httpx.Response] = []

    def changing(request: httpx.Request) -> httpx.Response:
        real = signed(request, offer().model_dump_json().encode())
        kept.append(real)
        return httpx.Response(200, headers=real.headers, content=real.content.replace(b'"step":3', b'"step":4'))

    with pytest.raises(ShoalError, match="its body is not the one that was signed"):
        find_run(URL, client(changing))
    with pytest.raises(ShoalError, match="not over this answer to this request"):
        find_run(URL, client(lambda request: httpx.Response(200, headers=kept[0].headers, content=kept[0].content)))


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (httpx.Response(404, text="nothing"), "answers 404: no Shoal coordinator"),
        (httpx.Response(200, stream=httpx.ByteStream(b"x"), headers={"content-encoding": "gzip"}), "answers in gzip"),
        (httpx.Response(200, content=bytes(101)), "more than 100 bytes; tell its operator"),
        (httpx.Response(200, content=b"{}"), "is no offer"),
    ],
)
def test_what_is_no_offer(response: httpx.Response, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "OFFER_BYTES", 100)
    with pytest.raises(ShoalError, match=words):
        find_run(URL, client(lambda request: response))


def test_a_coordinator_that_is_away_is_named() -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(ShoalError, match="nothing answers at http://h:1 .refused."):
        find_run(URL, client(away))


def test_only_an_open_invite_of_the_run_itself_is_taken() -> None:
    fields = {"url": URL, "run": RUN, "role": "worker", "name": "g", "expires_s": 2**40}
    own, foreign = make_invite(OWNER, **fields, open=True), make_invite(OTHER, **fields, open=True)
    assert open_invite(offer(invite=own.encode())) == own
    for made, key, words in (
        (None, OWNER, "takes only workers with an invite"),
        (foreign, OWNER, "is of another run"),
        (foreign, OTHER, "did not found the run"),
        (foreign.model_copy(update={"key": OWNER.public}), OWNER, "not signed by this coordinator"),
        (make_invite(OWNER, **fields), OWNER, "for one node only"),
    ):
        with pytest.raises(ShoalError, match=words):
            open_invite(offer(invite=made.encode() if made else "", key=key.public))

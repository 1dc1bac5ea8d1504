"""Reading a run from outside: its address, its state, its history by cursor, and its offer."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from shoal.config.sections import RequirementsSection
from shoal.errors import ShoalError
from shoal.protocol import history
from shoal.protocol.history import History, PoolWatch, Status, UnreachableError, find_run, open_invite
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Address, AddressError, find_coordinator, make_invite, run_id, server_url
from shoal.protocol.messages import VERSION, RunOffer
from shoal.protocol.signing import sign_answer
from tests.watch.support import status

URL = "http://h:1"
STATE: Status = status().status
STEPS = [{"step": float(number), "reward/mean": 0.5} for number in range(5)]


def client(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(answer))


def watching(answer: Callable[[httpx.Request], httpx.Response]) -> PoolWatch:
    return PoolWatch(URL, client(answer))


def test_an_update_fetches_the_state_and_only_new_history() -> None:
    cursors = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/status":
            return httpx.Response(200, text=STATE.model_dump_json())
        after = int(request.url.params["after"])
        cursors.append(after)
        upto = min(after + 2, len(STEPS))
        return httpx.Response(
            200, text=History(cursor=upto, metrics=STEPS[after:upto], evaluations=[], samples=[]).model_dump_json()
        )

    pool = watching(answer)
    assert pool.look() == STATE
    assert (pool.history.metrics, cursors) == (STEPS, [0, 2, 4, 5])
    pool.look()
    assert cursors[4:] == [5], "known entries were fetched again"


def test_a_request_answered_with_429_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator limits the bytes per address. A long run's history or a large pool's state may exceed the limit."""
    paths: list[str] = []
    monkeypatch.setattr(history, "time", SimpleNamespace(monotonic=lambda: float(len(paths)), sleep=lambda _: None))

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        if len(paths) % 3:
            return httpx.Response(429)
        if request.url.path == "/v1/status":
            return httpx.Response(200, text=STATE.model_dump_json())
        return httpx.Response(200, text='{"cursor": 0, "metrics": [], "evaluations": [], "samples": []}')

    assert watching(answer).look() == STATE and paths == 3 * ["/v1/status"] + 3 * ["/v1/history"]
    with pytest.raises(UnreachableError):
        watching(lambda request: paths.append("") or httpx.Response(429)).look()


def test_the_error_for_a_coordinator_that_does_not_answer_names_it() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused", request=request)

    with pytest.raises(UnreachableError, match=f"no coordinator answers at {URL} .connection refused."):
        watching(refuse).look()


@pytest.mark.parametrize(
    "answer",
    [httpx.Response(404), httpx.Response(200, text="<html>"), httpx.Response(200, text="{}"), httpx.Response(302)],
    ids=["404", "html", "json", "redirect"],
)
def test_another_server_is_not_taken_for_a_coordinator(answer: httpx.Response) -> None:
    with pytest.raises(UnreachableError, match=f"the server at {URL} is not a Shoal coordinator"):
        watching(lambda request: answer).look()


@pytest.mark.parametrize(
    "text", ["http://h", "https://h.example.org", "http://10.0.0.1:1/", "http://[::1]:8700", "http://h:65535"]
)
def test_a_coordinators_url_has_scheme_and_host(text: str) -> None:
    assert server_url(text) == text.rstrip("/")


@pytest.mark.parametrize(
    "text",
    [
        *("", "h:8700", "localhost:8700", "10.0.0.1", "ftp://h", "http://", "http://:8700", "http://" + "h" * 200),
        *("http://h:0", "http://h:70000", "http://h:x", "http://two words:1", "http://h:1\n"),
        *("http://h/v1", "http://h?x=1", "http://h?", "http://h:1#", "http://u@h", "http://:password@h"),
        *("http://a\\b", "http://a..b", f"http://{'a' * 64}", "http://１２７.0.0.1", "http://h%00"),
    ],
)
def test_the_error_for_any_other_url_shows_an_example(text: str) -> None:
    with pytest.raises(AddressError, match="write http://HOST:PORT"):
        server_url(text)


def test_a_pool_is_found_by_url_and_by_the_folder_of_a_run_or_coordinator(tmp_path: Path) -> None:
    (tmp_path / "coordinator").mkdir()
    Address(url=URL, run="sums").write(tmp_path / "coordinator")
    for where in (URL, f"{URL}/", str(tmp_path), str(tmp_path / "coordinator")):
        assert find_coordinator(where) == URL


def test_the_error_for_a_folder_without_a_coordinator_names_it(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match=f"{tmp_path} is neither the folder of a run nor of a coordinator"):
        find_coordinator(str(tmp_path))
    (tmp_path / "coordinator.json").write_text("{")
    with pytest.raises(AddressError, match=f"{tmp_path}/coordinator.json is damaged: restore"):
        find_coordinator(str(tmp_path))


# --- a run's offer ---------------------------------------------------------------------------------------------------


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


def signed(request: httpx.Request, body: bytes, signer: Identity = OWNER) -> httpx.Response:
    answer = {"status": 200, "body_sha256": sha256(body).digest(), "created_s": 1}
    target = request.url.raw_path.decode()
    headers = sign_answer(signer, request.method, target, request.headers, **answer)
    return httpx.Response(200, content=body, headers=headers)


def offered(*, signer: Identity = OWNER, trusted: str = "", **changed: Any) -> RunOffer:
    """Return the offer that `find_run` reads. `signer` signs the answer."""

    def coordinator(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == f"{URL}/v1/offer"
        return signed(request, offer(**changed).model_dump_json().encode(), signer)

    return find_run(f"{URL}/", client(coordinator), trusted)


def test_an_offer_that_its_coordinator_signed_is_believed() -> None:
    assert offered() == offered(trusted=OWNER.public) == offer()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"protocol": VERSION + 1},
            f"speaks protocol {VERSION + 1}, but this machine speaks {VERSION}: install the same version",
        ),
        ({"requirements": {"places": 8, "magic": 1}}, "is not an offer of this version"),
        ({"signer": OTHER}, "cannot be trusted: "),
        ({"signer": OTHER, "key": OTHER.public, "trusted": OWNER.public}, "cannot be trusted: "),
    ],
)
def test_an_offer_of_another_version_or_signer_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ShoalError, match=words):
        offered(**changed)


def test_a_changed_or_replayed_offer_is_refused() -> None:
    kept: list[httpx.Response] = []

    def changing(request: httpx.Request) -> httpx.Response:
        real = signed(request, offer().model_dump_json().encode())
        kept.append(real)
        return httpx.Response(200, headers=real.headers, content=real.content.replace(b'"step":3', b'"step":4'))

    with pytest.raises(ShoalError, match="its body is not the one that was signed"):
        find_run(URL, client(changing))
    with pytest.raises(ShoalError, match="does not cover this answer to this request"):
        find_run(URL, client(lambda request: httpx.Response(200, headers=kept[0].headers, content=kept[0].content)))


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (httpx.Response(404, text="nothing"), "answers 404: it is not a Shoal coordinator"),
        (
            httpx.Response(200, stream=httpx.ByteStream(b"x"), headers={"content-encoding": "gzip"}),
            "answer is compressed",
        ),
        (httpx.Response(200, content=bytes(101)), "more than 100 bytes; tell its operator"),
        (httpx.Response(200, content=b"{}"), "is not an offer"),
    ],
)
def test_an_answer_that_is_not_an_offer_is_refused(
    response: httpx.Response, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "OFFER_BYTES", 100)
    with pytest.raises(ShoalError, match=words):
        find_run(URL, client(lambda request: response))


def test_the_error_for_an_offer_that_cannot_be_fetched_names_the_url() -> None:
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
        (foreign, OWNER, "is for another run"),
        (foreign, OTHER, "does not belong to the coordinator in the invite"),
        (foreign.model_copy(update={"key": OWNER.public}), OWNER, "not signed by this coordinator"),
        (make_invite(OWNER, **fields), OWNER, "for one node only"),
    ):
        with pytest.raises(ShoalError, match=words):
            open_invite(offer(invite=made.encode() if made else "", key=key.public))

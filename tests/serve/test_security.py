"""What strangers and other users may not do, each attack by its own test."""

import asyncio
import contextlib
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shoal.errors import UserError
from shoal.serve.chat.accounts import IDLE_S, SESSION_S, Accounts, connect
from shoal.serve.openai.routes import Keys
from shoal.watch.page.files import POLICY
from shoal.watch.page.guard import HttpError

from .people import Person
from .support import CHEAP, Running, serving


@pytest.mark.parametrize("line", ["short 123456789012345", "no-key", "a name 1234567890123456"])
def test_a_key_that_can_be_guessed_or_misread_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# names and keys\n\nlong 1234567890123456\n{line}\n")
    with pytest.raises(UserError, match="line 4: write `NAME KEY`, a key of 16 characters or more"):
        Keys.read(file)


@pytest.fixture(scope="module")
def eve(page: Running) -> Person:
    person = Person(page, "eve")
    person.enter()
    return person


@pytest.mark.parametrize(
    "headers",
    [
        {"X-CSRF-Token": ""},
        {"X-CSRF-Token": "guess"},
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_another_sites_request_changes_nothing(ada: Person, headers: dict[str, str]) -> None:
    before = ada.get("conversations").json()
    assert ada.post("conversations", headers=headers).status_code == 403
    assert ada.get("conversations").json() == before


def test_a_form_of_another_site_is_no_json(ada: Person, page: Running) -> None:
    headers = {"X-CSRF-Token": ada.csrf, "Content-Type": "text/plain"}
    assert ada.http.post("/chat/conversations", content="{}", headers=headers).status_code == 415
    login = httpx.post(f"{page.url}/chat/login", data={"name": "ada"}, headers={"Origin": "https://evil.example"})
    assert login.status_code == 403


def test_cookies_are_out_of_reach_of_scripts_and_other_sites(page: Running) -> None:
    response = Person(page, "cook").enter()
    for cookie in response.headers.get_list("set-cookie"):
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/" in cookie


def test_over_https_cookies_are_secure(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path, ready=False, secure_cookies=True, hasher=CHEAP) as running:
        assert all("Secure" in cookie for cookie in Person(running).enter().headers.get_list("set-cookie"))


def test_a_session_given_before_login_is_not_the_one_after(page: Running) -> None:
    person = Person(page, "fixed")
    person.enter()
    planted = person.http.cookies["shoal_session"]
    person.enter("login")
    assert person.http.cookies["shoal_session"] != planted
    stale = httpx.get(f"{page.url}/chat/conversations", cookies={"shoal_session": planted})
    assert stale.status_code == 401


def test_another_users_conversation_is_as_absent_as_none(ada: Person, eve: Person) -> None:
    id = ada.begin()
    message = ada.say(id)[-1]["message"]["id"]
    absent = eve.get("conversations/0123456789ab")
    tries = [
        eve.get(f"conversations/{id}"),
        eve.get(f"conversations/{id}/messages/{message}/proof"),
        eve.post(f"conversations/{id}/messages/{message}/verify"),
        eve.post(f"conversations/{id}", {"leaf": message}),
        eve.post(f"conversations/{id}/replies", {"content": "hi", "models": [eve.model]}),
        eve.http.request(
            "DELETE",
            f"/chat/conversations/{id}",
            headers={"X-CSRF-Token": eve.csrf, "Content-Type": "application/json"},
        ),
    ]
    for response in tries:
        assert (response.status_code, response.json()) == (404, absent.json())
    own = eve.begin()
    assert eve.get(f"conversations/{own}/messages/{message}/proof").status_code == 404
    assert id not in [one["id"] for one in eve.get("conversations").json()]
    assert len(ada.read(id)["messages"]) == 2


def test_guessing_a_password_is_slowed_and_locks_nobody_out_of_a_known_browser(page: Running) -> None:
    victim = Person(page, "victim")
    victim.enter()
    guesser = Person(page, "victim")
    answers = [guesser.enter("login", f"wrong guess {n}") for n in range(22)]
    assert answers[0].status_code == 401 and answers[0].json()["error"] == "name or password is wrong"
    assert answers[-1].status_code == 429 and int(answers[-1].headers["Retry-After"]) > 0
    assert victim.enter("login").status_code == 200  # the browser that the user has logged in with before


def test_behind_a_proxy_each_client_is_counted_alone_and_elsewhere_nobody_names_an_address(
    page: Running, tiny_folder: Path, tmp_path: Path
) -> None:
    def last_answer(running: Running) -> int:
        person = Person(running)
        for n in range(22):  # each with another name, and pretending another address
            person.name = f"somebody-{n}"
            person.http.headers["X-Forwarded-For"] = f"1.2.3.4, 10.0.{n}.1"
            status = person.enter("login").status_code
        return status

    with serving(tiny_folder, tmp_path, ready=False, secure_cookies=True, hasher=CHEAP) as proxied:
        assert last_answer(proxied) == 401
    assert last_answer(page) == 429


def test_an_unknown_name_is_refused_as_a_wrong_password_is(tmp_path: Path) -> None:
    accounts = Accounts(connect(tmp_path / "db"), hasher=CHEAP)

    async def main() -> list[str]:
        await accounts.register("ada", "correct horse battery", "here")
        said = []
        for name in ("ada", "nobody"):
            with pytest.raises(HttpError) as refused:
                await accounts.log_in(name, "wrong wrong wrong", "here")
            said.append(str(refused.value))
        return said

    one, other = asyncio.run(main())
    assert one == other


def test_a_session_ends_by_age_and_by_idling(tmp_path: Path) -> None:
    now_s = 1000.0
    accounts = Accounts(connect(tmp_path / "db"), clock=lambda: now_s, hasher=CHEAP)
    opened = asyncio.run(accounts.register("ada", "correct horse battery", "here"))
    assert accounts.session(opened.token)
    now_s += IDLE_S + 1
    assert accounts.session(opened.token) is None
    opened = asyncio.run(accounts.log_in("ada", "correct horse battery", "here"))
    while now_s < 1000.0 + 2 * IDLE_S + SESSION_S:
        now_s += IDLE_S / 2
        accounts.session(opened.token)
    assert accounts.session(opened.token) is None


def test_the_database_holds_no_password_and_no_token(tmp_path: Path) -> None:
    accounts = Accounts(connect(tmp_path / "db"), hasher=CHEAP)
    opened = asyncio.run(accounts.register("ada", "correct horse battery", "here"))
    everything = "\n".join(sqlite3.connect(tmp_path / "db").iterdump())
    assert "argon2id" in everything
    for secret in ("correct horse", opened.token, opened.device):
        assert secret not in everything
    assert (tmp_path / "db").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "path",
    [
        "/static/../index.html",
        "/static/%2e%2e/routes.py",
        "/static/..%2froutes.py",
        "/static/%2e%2e%2f%2e%2e%2fservice.py",
        "/static//etc/passwd",
        "/static/chat.sqlite",
        "/chat/conversations/..%2f..%2fetc",
    ],
)
def test_no_path_leads_out_of_the_static_files(ada: Person, path: str, page: Running) -> None:
    host, port = page.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:  # a client would tidy the path up
        cookie = f"shoal_session={ada.http.cookies['shoal_session']}"
        raw.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nCookie: {cookie}\r\nConnection: close\r\n\r\n".encode()
        )
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.split()[1] in (b"404", b"400")
    assert b"root:" not in answer and b"import " not in answer


def test_an_oversized_body_is_refused_before_it_is_read(ada: Person, page: Running) -> None:
    assert ada.post("login", {"name": "ada", "password": "x" * 10_000}).status_code == 413

    def endless() -> Iterator[bytes]:
        for _ in range(10_000):
            yield b" " * 1024

    with contextlib.suppress(httpx.TransportError):  # closed before the client had sent everything
        response = ada.http.post("/chat/login", content=endless(), headers={"Content-Type": "application/json"})
        assert response.status_code == 413
    with page.api() as client:
        body = {"model": page.model, "messages": [{"role": "user", "content": "x" * (5 << 20)}]}
        with contextlib.suppress(httpx.TransportError):
            assert client.post("/v1/chat/completions", json=body).status_code == 413


def test_a_body_that_dribbles_is_given_up(page: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.watch.page.guard.json_body.__defaults__", (0.2,))
    host, port = page.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as raw:
        head = "POST /chat/login HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        raw.sendall(head.encode())
        assert raw.recv(65536).split()[1] == b"408"


def test_a_name_cannot_break_a_header(ada: Person) -> None:
    for name in ("a\r\nSet-Cookie: x=1", "a\nb", 'a"b', "ada\u2028", ""):
        ada_like = ada.http.post("/chat/register", json={"name": name, "password": "correct horse battery"})
        assert ada_like.status_code == 400


def test_every_answer_carries_the_policy_and_no_page_needs_an_exception(page: Running, ada: Person) -> None:
    for path in ("/", "/static/app.js", "/chat/me", "/absent", "/v1/models", "/health"):
        headers = ada.http.get(path).headers
        assert headers["Content-Security-Policy"] == POLICY
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert "unsafe" not in POLICY and "http" not in POLICY
    html = ada.http.get("/").text
    assert "<style" not in html and " style=" not in html and "onclick" not in html
    assert html.count("<script src=") + html.count('<script type="module" src=') == html.count("<script")


def test_nothing_on_the_page_asks_a_third_party_or_writes_markup(page: Running) -> None:
    from shoal.serve.chat.routes import STATIC
    from shoal.watch.page.files import SHARED

    for path in (*SHARED.iterdir(), *STATIC.iterdir()):
        text = path.read_text()
        if path.name.startswith("katex"):
            continue  # the browser itself refuses what is unsafe: test_browser
        for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert unsafe not in text, (path.name, unsafe)
        for line in text.replace("http://www.w3.org/2000/svg", "").splitlines():
            assert "//cdn" not in line and 'src="http' not in line and "url(http" not in line and "@import" not in line


def test_the_page_is_light(page: Running) -> None:
    from shoal.serve.chat.routes import STATIC
    from shoal.watch.page.files import SHARED, Files

    assert sum(Files([SHARED, STATIC]).sizes_bytes.values()) < 110_000


def test_many_verifications_are_slowed(page: Running, eve: Person) -> None:
    answers = [eve.post("verify", {"no": "reply"}).status_code for _ in range(31)]
    assert answers[0] == 400 and answers[-1] == 429

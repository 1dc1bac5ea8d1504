"""Attacks by strangers and by other users, one per test."""

import asyncio
import contextlib
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp.test_utils import TestClient, TestServer

from shoal.engine.torch_engine import TorchEngine
from shoal.errors import UserError
from shoal.serve.chat.accounts import IDLE_S, SESSION_S, Accounts, connect
from shoal.serve.chat.routes import STATIC
from shoal.serve.openai.routes import Keys
from shoal.serve.service import Service, Settings
from shoal.serve.versions import ModelSource
from shoal.watch.page.files import POLICY, SHARED, Files
from shoal.watch.page.guard import HttpError, RateLimit
from shoal.watch.page.server import STATIC as DASHBOARD

from .support import CHEAP, PASSWORD, Running, User, serving


@pytest.mark.parametrize("line", ["short 123456789012345", "no-key", "a name 1234567890123456"])
def test_a_key_that_can_be_guessed_or_misread_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# names and keys\n\nlong 1234567890123456\n{line}\n")
    with pytest.raises(UserError, match="line 4: write `NAME KEY`, with a key of 16 characters or more"):
        Keys.read(file)


@pytest.fixture(scope="module")
def eve(page: Running) -> User:
    return User.registered(page, "eve")


@pytest.mark.parametrize(
    "headers",
    [
        {"X-CSRF-Token": ""},
        {"X-CSRF-Token": "guess"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://["},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_request_from_another_site_changes_nothing(ada: User, headers: dict[str, str]) -> None:
    before = ada.get("conversations").json()
    assert ada.post("conversations", headers=headers).status_code == 403
    assert ada.get("conversations").json() == before


def test_secrets_that_are_not_utf8_are_refused(ada: User, page: Running) -> None:
    assert ada.post("conversations", headers={"X-CSRF-Token": b"\xff"}).status_code == 403
    for path, header in (
        ("chat/conversations", (b"Cookie", b"shoal_session=\xff")),
        ("v1/models", (b"Authorization", b"Bearer \xff")),
    ):
        assert httpx.get(f"{page.url}/{path}", headers=[header]).status_code == 401


def test_only_requests_with_a_key_or_a_session_keep_their_connection(ada: User, page: Running) -> None:
    """If others kept it, strangers could occupy all connections with one request a minute each."""
    with page.client() as stranger:
        for path in ("", "static/missing", "health", "metrics", "chat/me", "chat/models", "v1/models", "v1/missing"):
            assert stranger.get(f"/{path}").headers.get("Connection") == "close", path
        wrong = {"name": "ada", "password": "a wrong password"}
        assert stranger.post("/chat/login", json=wrong).headers.get("Connection") == "close"
    with page.api() as member:
        assert "Connection" not in member.get("/v1/models").headers
    assert "Connection" not in ada.get("models").headers


def test_a_form_from_another_site_is_refused(ada: User, page: Running) -> None:
    headers = {"X-CSRF-Token": ada.csrf, "Content-Type": "text/plain"}
    assert ada.http.post("/chat/conversations", content="{}", headers=headers).status_code == 415
    login = httpx.post(f"{page.url}/chat/login", data={"name": "ada"}, headers={"Origin": "https://evil.example"})
    assert login.status_code == 403


def test_scripts_and_other_sites_cannot_use_cookies(page: Running) -> None:
    for cookie in User(page, "cook").enter().headers.get_list("set-cookie"):
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/" in cookie


def test_over_https_cookies_are_secure(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path, ready=False, secure_cookies=True, hasher=CHEAP) as running:
        assert all("Secure" in cookie for cookie in User(running).enter().headers.get_list("set-cookie"))


def test_a_login_replaces_a_planted_session(page: Running) -> None:
    user = User.registered(page, "fixed")
    planted = user.http.cookies["shoal_session"]
    user.enter("login")
    assert user.http.cookies["shoal_session"] != planted
    stale = httpx.get(f"{page.url}/chat/conversations", cookies={"shoal_session": planted})
    assert stale.status_code == 401


def test_another_users_conversation_gives_the_same_response_as_an_absent_one(ada: User, eve: User) -> None:
    id = ada.begin()
    message = ada.say(id)[-1]["message"]["id"]
    absent = eve.get("conversations/0123456789ab")
    responses = [
        eve.get(f"conversations/{id}"),
        eve.get(f"conversations/{id}/messages/{message}/proof"),
        eve.post(f"conversations/{id}/messages/{message}/verify"),
        eve.post(f"conversations/{id}", {"leaf": message}),
        eve.post(f"conversations/{id}/replies", {"content": "hi", "models": [eve.model]}),
        eve.delete(f"conversations/{id}"),
    ]
    for response in responses:
        assert (response.status_code, response.json()) == (404, absent.json())
    own = eve.begin()
    assert eve.get(f"conversations/{own}/messages/{message}/proof").status_code == 404
    assert id not in [row["id"] for row in eve.get("conversations").json()]
    assert len(ada.read(id)["messages"]) == 2


def test_guessing_passwords_is_rate_limited_and_does_not_lock_out_a_known_browser(page: Running) -> None:
    victim = User.registered(page, "victim")
    guesser = User(page, "victim")
    responses = [guesser.enter("login", f"wrong guess {n}") for n in range(22)]
    assert responses[0].status_code == 401 and responses[0].json()["error"] == "name or password is wrong"
    assert responses[-1].status_code == 429 and int(responses[-1].headers["Retry-After"]) > 0
    # The victim's browser has logged in before, so it has a limit of its own.
    assert victim.enter("login").status_code == 200


def test_forwarded_addresses_count_only_behind_a_proxy(page: Running, tiny_folder: Path, tmp_path: Path) -> None:
    def last_status(running: Running) -> int:
        user = User(running)
        for n in range(22):  # each login has a new name and claims a new address
            user.name = f"somebody-{n}"
            user.http.headers["X-Forwarded-For"] = f"1.2.3.4, 10.0.{n}.1"
            status = user.enter("login").status_code
        return status

    with serving(tiny_folder, tmp_path, ready=False, secure_cookies=True, hasher=CHEAP) as proxied:
        assert last_status(proxied) == 401
    assert last_status(page) == 429


def test_unknown_names_and_wrong_passwords_give_the_same_error(tmp_path: Path) -> None:
    accounts = Accounts(connect(tmp_path / "db"), hasher=CHEAP)

    async def main() -> list[str]:
        await accounts.register("ada", PASSWORD, "here")
        messages = []
        for name in ("ada", "nobody"):
            with pytest.raises(HttpError) as refused:
                await accounts.log_in(name, "wrong wrong wrong", "here")
            messages.append(str(refused.value))
        return messages

    assert len(set(asyncio.run(main()))) == 1


def test_nobody_can_register_the_user_of_an_open_server(tmp_path: Path) -> None:
    accounts = Accounts(connect(tmp_path / "db"), hasher=CHEAP)
    for name in ("local", "Local"):
        with pytest.raises(HttpError, match="reserved"):
            asyncio.run(accounts.register(name, PASSWORD, "here"))
    assert accounts.local().session.name == "local"


def test_an_open_server_refuses_a_database_in_which_somebody_has_its_users_name(
    tiny_folder: Path, tmp_path: Path
) -> None:
    db = connect(tmp_path / "chat.sqlite")
    db.execute("INSERT INTO user(name, password, created_s) VALUES('Local', ?, 0)", (CHEAP.hash(PASSWORD),))
    with (
        pytest.raises(UserError, match=r"'Local' in .*chat\.sqlite .* --dir"),
        serving(tiny_folder, tmp_path, ready=False, open=True, hasher=CHEAP),
    ):
        pass


def test_a_session_ends_by_age_or_by_idling(tmp_path: Path) -> None:
    now_s = 1000.0
    accounts = Accounts(connect(tmp_path / "db"), clock=lambda: now_s, hasher=CHEAP)
    opened = asyncio.run(accounts.register("ada", PASSWORD, "here"))
    assert accounts.session(opened.token)
    now_s += IDLE_S + 1
    assert accounts.session(opened.token) is None
    opened = asyncio.run(accounts.log_in("ada", PASSWORD, "here"))
    while now_s < 1000.0 + 2 * IDLE_S + SESSION_S:
        now_s += IDLE_S / 2
        accounts.session(opened.token)
    assert accounts.session(opened.token) is None


def test_the_database_holds_no_password_and_no_token(tmp_path: Path) -> None:
    accounts = Accounts(connect(tmp_path / "db"), hasher=CHEAP)
    opened = asyncio.run(accounts.register("ada", PASSWORD, "here"))
    dump = "\n".join(sqlite3.connect(tmp_path / "db").iterdump())
    assert "argon2id" in dump
    for secret in (PASSWORD, opened.token, opened.device):
        assert secret not in dump
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
def test_no_path_leads_out_of_the_folder_of_static_files(ada: User, path: str, page: Running) -> None:
    with socket.create_connection(page.address, timeout=10) as connection:  # httpx would normalize the path
        cookie = f"shoal_session={ada.http.cookies['shoal_session']}"
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nCookie: {cookie}\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode())
        response = b"".join(iter(lambda: connection.recv(65536), b""))
    assert response.split()[1] in (b"404", b"400")
    assert b"root:" not in response and b"import " not in response


def test_an_oversized_body_is_refused_before_it_is_read(ada: User, page: Running) -> None:
    assert ada.post("login", {"name": "ada", "password": "x" * 10_000}).status_code == 413

    def endless() -> Iterator[bytes]:
        for _ in range(10_000):
            yield b" " * 1024

    with contextlib.suppress(httpx.TransportError):  # the server may close before the client has sent everything
        response = ada.http.post("/chat/login", content=endless(), headers={"Content-Type": "application/json"})
        assert response.status_code == 413
    with contextlib.suppress(httpx.TransportError):
        assert page.chat([{"role": "user", "content": "x" * (5 << 20)}]).status_code == 413


def test_a_slow_body_has_a_deadline(page: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.watch.page.guard.BODY_S", 0.2)
    with socket.create_connection(page.address, timeout=30) as connection:
        head = "POST /chat/login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert connection.recv(65536).split()[1] == b"408"


def test_a_name_cannot_break_a_header(ada: User) -> None:
    for name in ("a\r\nSet-Cookie: x=1", "a\nb", 'a"b', "ada\u2028", ""):
        response = ada.http.post("/chat/register", json={"name": name, "password": PASSWORD})
        assert response.status_code == 400


def test_every_response_has_the_security_policy_and_the_page_needs_no_exception(ada: User) -> None:
    for path in ("/", "/static/app.js", "/chat/me", "/absent", "/v1/models", "/health"):
        headers = ada.http.get(path).headers
        assert headers["Content-Security-Policy"] == POLICY
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert "unsafe" not in POLICY and "http" not in POLICY
    html = ada.http.get("/").text
    assert "<style" not in html and " style=" not in html and "onclick" not in html
    assert html.count("<script src=") + html.count('<script type="module" src=') == html.count("<script")


def test_no_file_of_a_page_contacts_a_third_party_or_writes_markup() -> None:
    for path in (*SHARED.iterdir(), *STATIC.iterdir(), *DASHBOARD.iterdir()):
        text = path.read_text()
        if path.name.startswith("katex"):
            continue  # KaTeX is not ours; test_browser tests that the browser itself refuses unsafe code
        for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert unsafe not in text, (path.name, unsafe)
        for line in text.replace("http://www.w3.org/2000/svg", "").splitlines():
            assert "//cdn" not in line and 'src="http' not in line and "url(http" not in line and "@import" not in line


def test_the_page_is_small() -> None:
    assert sum(Files([SHARED, STATIC]).sizes_bytes.values()) < 110_000


def test_verifications_are_rate_limited(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RateLimit.__init__, "__defaults__", (lambda: 0.0,))  # no time passes, so no use is refilled
    with serving(tiny_folder, tmp_path, hasher=CHEAP) as page:
        eve = User.registered(page, "eve")
        reply = eve.reply()
        statuses = [eve.post(f"{reply}/verify").status_code for _ in range(31)]
    assert statuses == [200] * 30 + [429]


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({}, 421),
        ({"secure_cookies": True}, 200),
        ({"host": "0.0.0.0"}, 200),
        ({"hosts": {"chat.example"}}, 200),
        ({"hosts": {"b.example"}}, 421),
    ],
)
async def test_on_loopback_without_a_proxy_no_other_host_name_is_served(
    settings: dict[str, Any], status: int, tiny_folder: Path, tmp_path: Path
) -> None:
    source = ModelSource("tiny", None, tiny_folder)
    service = Service(source, Settings(folder=tmp_path, chat=False, **settings), lambda: TorchEngine("float32"))
    application = service.app()
    application.cleanup_ctx.clear()  # no model is needed
    async with TestClient(TestServer(application)) as client:
        answer = await client.get("/metrics", headers={"Host": "chat.example"})
        assert answer.status == status

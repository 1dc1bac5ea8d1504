"""Which addresses a downloader may connect to, and through which proxy."""

import asyncio
import socket
from typing import Any

import pytest

from shoal.shardcast import Access, FetchError, ShardStore, app
from shoal.shardcast.fetch import reach as reach_module
from shoal.shardcast.fetch.download import Sources
from shoal.shardcast.fetch.reach import ORDER, OutOfReach, Resolver, check_host, narrowest, proxy_for
from shoal.shardcast.server import serve, url_of

from .support import PUBLIC_KEY, against, client, contents, published

SHORT = ["127.1", "2130706433", "017700000001", "0x7f000001"]  # the system connects to 127.0.0.1
LOCAL = [
    "127.0.0.1",
    "127.9.9.9",
    "::1",
    "localhost",
    "localhost.",
    "a.localhost",
    "::ffff:127.0.0.1",
    "64:ff9b::7f00:1",
    *SHORT,
]
PRIVATE = ["10.0.0.7", "172.16.0.1", "192.168.1.1", "100.64.0.9", "fd00::1", "2002:0a00:0001::", "::ffff:10.0.0.7"]
PUBLIC = ["1.1.1.1", "2606:4700::1111", "relay.example.org"]
NOWHERE = ["169.254.169.254", "fe80::1", "fe80::1%eth0", "0.0.0.0", "0", "::", "224.0.0.1", "::ffff:169.254.169.254"]


@pytest.mark.parametrize("reach", ORDER)
def test_each_reach_includes_its_own_addresses_and_those_of_wider_reaches(reach):
    for needs, hosts in zip(ORDER, (PUBLIC, PRIVATE, LOCAL), strict=True):
        for host in hosts:
            if ORDER.index(needs) <= ORDER.index(reach):
                check_host(host, reach)
            else:
                with pytest.raises(
                    OutOfReach, match=f'relays.reach = "{needs}" with --reach {needs} on this machine allows it'
                ):
                    check_host(host, reach)
    for host in NOWHERE:
        with pytest.raises(OutOfReach, match="no other machine can connect"):
            check_host(host, reach)


def test_narrowest_is_the_narrowest_reach_that_includes_a_host():
    for needs, hosts in zip(ORDER, (PUBLIC, PRIVATE, LOCAL), strict=True):
        assert {narrowest(host) for host in hosts} == {needs}
    with pytest.raises(OutOfReach):
        narrowest("169.254.169.254")


class System:
    """A resolver that returns the same addresses for every name."""

    addresses = ("1.1.1.1",)

    async def resolve(self, host: str, port: int, family: Any) -> list[dict[str, Any]]:
        return [{"hostname": host, "host": address, "port": port, "family": family} for address in self.addresses]

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("addresses", [("127.0.0.1",), ("1.1.1.1", "10.0.0.1"), ("169.254.169.254",)])
async def test_the_addresses_of_a_name_are_checked_when_a_connection_is_made(monkeypatch, addresses):
    monkeypatch.setattr(reach_module, "ThreadedResolver", System)

    async def resolve(exempt: bool = False) -> list[str]:
        results = await Resolver("public", lambda host: exempt).resolve("relay.example.org", 80, socket.AF_INET)
        return [result["host"] for result in results]

    assert await resolve() == ["1.1.1.1"]
    monkeypatch.setattr(System, "addresses", addresses)
    with pytest.raises(OutOfReach):
        await resolve()
    assert await resolve(exempt=True) == list(addresses), (
        "an exempt name, such as the operator's own proxy, must resolve to every address"
    )


async def refusal(url: str) -> str:
    """Return why a node of a public pool does not query the server at `url`."""
    async with Sources.open(Access(PUBLIC_KEY, reach="public"), [url]) as sources:
        _, reasons = await sources.ask(lambda source: source.listing())
        return reasons[url]


async def test_the_error_for_a_private_address_names_the_setting(monkeypatch):
    monkeypatch.setattr(reach_module, "ThreadedResolver", System)
    monkeypatch.setattr(System, "addresses", ("10.0.0.7",))
    reason = await refusal("http://relay.example.org:8720")
    assert "relay.example.org is 10.0.0.7, a private address" in reason and "--reach private on this machine" in reason
    assert "DNS" not in reason


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "127.1", "①②⑦.⓪.⓪.①", "127。0。0。1"])
async def test_no_connection_is_made_to_this_machine_for_a_public_pool(host):
    with socket.create_server(("127.0.0.1", 0)) as service:
        service.settimeout(0.2)
        reason = await refusal(f"http://{host}:{service.getsockname()[1]}")
        assert "a local address" in reason
        with pytest.raises(TimeoutError):
            service.accept()


@pytest.mark.parametrize(("host", "url"), [("::1", "http://[::1]:80"), ("127.0.0.1", "http://127.0.0.1:80")])
def test_the_url_of_an_ipv6_host_has_brackets(host, url):
    assert url_of(host, 80) == url


async def test_an_ipv6_address_can_be_served(tmp_path):
    published(tmp_path, 7)
    try:
        runner, port = await serve(app(ShardStore(tmp_path / "origin")), "::1")
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    try:
        _, manifest = await asyncio.to_thread(client(tmp_path, url_of("::1", port)).fetch)
    finally:
        await runner.cleanup()
    assert manifest.version == 7


def name_proxy(monkeypatch, **variables: str) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)


def test_the_proxy_in_the_environment_is_used(monkeypatch):
    name_proxy(monkeypatch, HTTPS_PROXY="http://user:secret@proxy:3128", NO_PROXY="relay.near,10.0.0.1")
    proxy = proxy_for("https://relay.far:8080")
    assert proxy == ("http://user:secret@proxy:3128", "http://proxy:3128")
    for url in ("http://relay.far", "https://relay.near:1", "https://10.0.0.1", "https://127.0.0.1", "https://[::1]:8"):
        assert proxy_for(url) is None


def test_the_error_names_an_unsupported_proxy(monkeypatch):
    name_proxy(monkeypatch, ALL_PROXY="socks5://proxy:1080")
    with pytest.raises(FetchError, match="socks5://proxy:1080 for http://relay.far"):
        proxy_for("http://relay.far")


def test_a_client_fetches_through_the_proxy(tmp_path, monkeypatch):
    """In this test the proxy is a server of the store. It receives absolute URLs of a host that does not exist."""
    published(tmp_path, 7)

    def act(url):
        name_proxy(monkeypatch, http_proxy=url)
        return client(tmp_path, "http://relay.invalid:8080").fetch()

    folder, _ = against(act, tmp_path / "origin")
    assert contents(folder) == contents(tmp_path / "model7")


def test_the_error_names_a_dead_proxy(tmp_path, monkeypatch):
    name_proxy(monkeypatch, http_proxy="http://127.0.0.1:1")
    with pytest.raises(FetchError, match=r"through the proxy http://127.0.0.1:1, which the environment names"):
        client(tmp_path, "http://relay.invalid:8080").fetch()

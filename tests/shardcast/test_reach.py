"""Announced URLs that lead into a node's own networks: as text, by name, and as fetched."""

import asyncio
import socket
from typing import Any

import pytest

from shoal.shardcast import Access
from shoal.shardcast.fetch import reach as reach_module
from shoal.shardcast.fetch.download import Sources
from shoal.shardcast.fetch.reach import ORDER, OutOfReach, Resolver, check_host, narrowest

from .support import PUBLIC_KEY

LOCAL = ["127.0.0.1", "127.9.9.9", "::1", "localhost", "a.localhost", "::ffff:127.0.0.1", "64:ff9b::7f00:1"]
PRIVATE = ["10.0.0.7", "172.16.0.1", "192.168.1.1", "100.64.0.9", "fd00::1", "2002:0a00:0001::", "::ffff:10.0.0.7"]
PUBLIC = ["1.1.1.1", "2606:4700::1111", "relay.example.org"]
NOWHERE = ["169.254.169.254", "fe80::1", "fe80::1%eth0", "0.0.0.0", "::", "224.0.0.1", "::ffff:169.254.169.254"]


@pytest.mark.parametrize("reach", ORDER)
def test_each_reach_includes_its_own_addresses_and_the_wider_ones(reach: Any) -> None:
    for needs, hosts in zip(ORDER, (PUBLIC, PRIVATE, LOCAL), strict=True):
        for host in hosts:
            if ORDER.index(needs) <= ORDER.index(reach):
                check_host(host, reach)
            else:
                with pytest.raises(OutOfReach, match=f'relays.reach = "{needs}" allows it'):
                    check_host(host, reach)
    for host in NOWHERE:
        with pytest.raises(OutOfReach, match="no server of a pool can be"):
            check_host(host, reach)


def test_a_pool_is_as_near_as_its_coordinator() -> None:
    for needs, hosts in zip(ORDER, (PUBLIC, PRIVATE, LOCAL), strict=True):
        assert {narrowest(host) for host in hosts} == {needs}
    with pytest.raises(OutOfReach):
        narrowest("169.254.169.254")


class System:
    """A resolver that knows one name."""

    addresses = ("1.1.1.1",)

    async def resolve(self, host: str, port: int, family: Any) -> list[dict[str, Any]]:
        return [{"hostname": host, "host": one, "port": port, "family": family} for one in self.addresses]

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("addresses", [("127.0.0.1",), ("1.1.1.1", "10.0.0.1"), ("169.254.169.254",)])
def test_a_name_is_refused_by_the_addresses_it_has_when_it_is_connected_to(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]
) -> None:
    monkeypatch.setattr(reach_module, "ThreadedResolver", System)

    async def ask(exempt: bool = False) -> list[str]:
        found = await Resolver("public", lambda host: exempt).resolve("relay.example.org", 80, socket.AF_INET)
        return [one["host"] for one in found]

    assert asyncio.run(ask()) == ["1.1.1.1"]
    monkeypatch.setattr(System, "addresses", addresses)
    with pytest.raises(OutOfReach):
        asyncio.run(ask())
    assert asyncio.run(ask(exempt=True)) == list(addresses), "the operator's own proxy"


async def refusal(url: str) -> str:
    """Why a node of a public pool does not ask the server at `url`."""
    async with Sources.open(Access(PUBLIC_KEY, reach="public"), [url]) as sources:
        _, reasons = await sources.ask(lambda source: source.listing())
        return reasons[url]


def test_a_relay_whose_name_leads_inside_is_refused_in_these_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach_module, "ThreadedResolver", System)
    monkeypatch.setattr(System, "addresses", ("10.0.0.7",))
    reason = asyncio.run(refusal("http://relay.example.org:8720"))
    assert 'relay.example.org is 10.0.0.7, a private address; relays.reach = "private" allows it' in reason
    assert "DNS" not in reason


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "127.1"])
def test_no_connection_is_made_to_this_machine_for_a_public_pool(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:
        service.settimeout(0.2)
        reason = asyncio.run(refusal(f"http://{host}:{service.getsockname()[1]}"))
        assert "a local address" in reason or "not a canonical IPv4 address" in reason
        with pytest.raises(TimeoutError):
            service.accept()

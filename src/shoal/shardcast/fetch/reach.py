"""Which addresses a downloader may connect to if other parties name the servers, and which proxy it uses.

    public    the internet
    private   the internet and private networks
    local     the internet, private networks, and this machine

Invariant: an untrusted URL cannot make this machine connect to its own services or its neighbours (SSRF), because
addresses are checked after DNS resolution. Link-local addresses (cloud metadata services), multicast and unspecified
addresses are always out of reach. Loopback addresses are never reached through a proxy.
Left out: limits on what an operator's own proxy connects to; SOCKS and https proxies; the system settings of macOS and
Windows.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Literal, NamedTuple
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from aiohttp import ThreadedResolver
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from shoal.shardcast.fetch import FetchError


class Proxy(NamedTuple):
    url: str  # may hold a name and a password
    shown: str  # the URL without name and password


def proxy_for(url: str) -> Proxy | None:
    """Return the proxy for this URL; None for a direct connection. Raise FetchError for an unsupported proxy."""
    parts, proxies = split_server(url), getproxies_environment()
    named = proxies.get(parts.scheme) or proxies.get("all")
    if not named or _is_local(parts.hostname or "") or proxy_bypass(parts.netloc):
        return None
    try:
        proxy = URL(named if "://" in named else f"http://{named}")
    except ValueError as error:
        raise FetchError("the environment names a proxy that is not a URL; write http://HOST:PORT") from error
    if proxy.scheme != "http" or not proxy.host:
        raise FetchError(
            f"the environment names the proxy {proxy.with_user(None)} for {url}, and only http:// proxies are supported; "
            "name another one, or add the host to NO_PROXY"
        )
    return Proxy(str(proxy), str(proxy.with_user(None)))


def split_server(url: str) -> SplitResult:
    """Split a server's URL. Raise FetchError unless it is http(s)://HOST[:PORT][/PATH]."""
    try:
        parts = urlsplit(url)
        port = parts.port  # raises ValueError for an invalid port
        URL(url)  # aiohttp must accept the URL, too
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise FetchError(f"{url[:80]!r} is not the URL of a server: write http://HOST:PORT")
    return parts


def is_proxy(host: str) -> bool:
    """Return whether the environment names this host as a proxy."""
    named = (url if "://" in url else f"http://{url}" for url in getproxies_environment().values())
    return host in {urlsplit(url).hostname for url in named}


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


Reach = Literal["local", "private", "public"]
ORDER: list[Reach] = ["public", "private", "local"]  # each reach includes those before it
NAT64 = IPv6Network("64:ff9b::/96")  # the last 32 bits of its addresses are an IPv4 address


class OutOfReach(OSError):
    """An address that this run's nodes must not connect to. The message says which setting allows it."""


def check_host(host: str, reach: Reach) -> None:
    """Raise OutOfReach if `host` is an address or localhost, and beyond `reach`. Do not resolve other names."""
    if (address := address_of(host)) is not None:
        _check(address, host, reach)


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """Return the address that `host` spells in any form, or that of localhost; None for a name, which is not resolved."""
    host = host.removesuffix(".")
    if host == "localhost" or host.endswith(".localhost"):
        return IPv4Address("127.0.0.1")
    try:
        return ip_address(host.partition("%")[0])
    except ValueError:
        try:
            return IPv4Address(socket.inet_aton(host))  # short forms, such as 127.1 and 2130706433
        except (OSError, ValueError):
            return None


def narrowest(host: str) -> Reach:
    """Return the narrowest reach that includes `host`, or "public" for a name, which is not resolved.

    Raise OutOfReach if no reach includes it.
    """
    for reach in ORDER[:-1]:
        try:
            check_host(host, reach)
            return reach
        except OutOfReach:
            continue
    check_host(host, "local")
    return "local"


def narrower(first: Reach, second: Reach) -> Reach:
    return min(first, second, key=ORDER.index)


class Resolver(AbstractResolver):
    """The system's resolver, which refuses addresses beyond `reach`. `exempt` says which hosts it does not check."""

    def __init__(self, reach: Reach, exempt: Callable[[str], bool] = lambda host: False) -> None:
        self._reach, self._exempt = reach, exempt
        self._system = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        results = await self._system.resolve(host, port, family)
        if not self._exempt(host):
            for result in results:  # one address out of reach makes the whole name untrustworthy
                _check(ip_address(result["host"].partition("%")[0]), host, self._reach)
        return results

    async def close(self) -> None:
        await self._system.close()


def _check(address: IPv4Address | IPv6Address, host: str, reach: Reach) -> None:
    needs = _needs(address)
    if needs is None:
        raise OutOfReach(f"{host} is {address}, to which no other machine can connect")
    if ORDER.index(needs) > ORDER.index(reach):
        how = f'relays.reach = "{needs}" with --reach {needs} on this machine'
        raise OutOfReach(f"{host} is {address}, a {needs} address; {how} allows it")


def _needs(address: IPv4Address | IPv6Address) -> Reach | None:
    """Return the narrowest reach that includes the address; None if no reach does."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in NAT64:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return _needs(inner)
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return None
    if address.is_loopback:
        return "local"
    return "public" if address.is_global else "private"

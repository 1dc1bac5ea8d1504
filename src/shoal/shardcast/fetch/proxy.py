"""The proxy that the environment names for a server: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, except for NO_PROXY's hosts.

Invariant: this machine's own addresses are never reached through a proxy, which could not know them.
Called by `source`.
Left out: SOCKS, proxies that are asked for over https, and the system settings of macOS and Windows.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from yarl import URL

from shoal.shardcast.fetch.errors import FetchError


class Proxy(NamedTuple):
    url: str  # may hold a name and a password
    shown: str  # without these


def proxy_for(url: str) -> Proxy | None:
    """None: the server is asked directly. Raises FetchError for a proxy of another kind."""
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
    """The parts of a server's URL. Raises FetchError unless it is http(s)://HOST[:PORT][/PATH]."""
    try:
        parts = urlsplit(url)
        port = parts.port  # raises ValueError for what is not a port
        URL(url)  # what aiohttp makes of it
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise FetchError(f"{url[:80]!r} is not the URL of a server: write http://HOST:PORT")
    return parts


def is_proxy(host: str) -> bool:
    """Whether the environment names this host as a proxy."""
    named = (url if "://" in url else f"http://{url}" for url in getproxies_environment().values())
    return host in {urlsplit(url).hostname for url in named}


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

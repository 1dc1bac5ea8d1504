"""The proxy that the environment names for a server: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, except for NO_PROXY's hosts.

Invariant: this machine's own addresses are never reached through a proxy, which could not know them.
Called by `source`.
Left out: SOCKS, proxies that are asked for over https, and the system settings of macOS and Windows.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from yarl import URL

from shoal.shardcast.fetch.errors import FetchError


class Proxy(NamedTuple):
    url: str  # may hold a name and a password
    shown: str  # without these


def proxy_for(url: str) -> Proxy | None:
    """None: the server is asked directly. Raises FetchError for a proxy of another kind."""
    parts, proxies = urlsplit(url), getproxies_environment()
    named = proxies.get(parts.scheme) or proxies.get("all")
    if not named or _is_local(parts.hostname or "") or proxy_bypass(parts.netloc):
        return None
    proxy = URL(named if "://" in named else f"http://{named}")
    if proxy.scheme != "http" or not proxy.host:
        raise FetchError(
            f"the environment names the proxy {proxy.with_user(None)} for {url}, and only http:// proxies are supported; "
            "name another one, or add the host to NO_PROXY"
        )
    return Proxy(str(proxy), str(proxy.with_user(None)))


def is_proxy(host: str) -> bool:
    """Whether the environment names this host as a proxy."""
    named = (url if "://" in url else f"http://{url}" for url in getproxies_environment().values())
    return host in {urlsplit(url).hostname for url in named}


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

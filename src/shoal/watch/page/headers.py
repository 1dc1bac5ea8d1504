"""Headers of every answer: a strict Content-Security-Policy, and no sniffing, framing or referrer.

Invariant: a page runs and shows only what this server sent as a file; text in a page, whoever wrote it, is never markup.
`require-trusted-types-for` makes the browser refuse `innerHTML` and its like altogether.
Attached to an application by `secure`.
"""

from collections.abc import Collection

from aiohttp import web

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def secure(application: web.Application, hosts: Collection[str] = ()) -> None:
    """Add the headers to every answer. `hosts`: names that requests may use for this server; empty: any.

    Names matter where no login protects the server: another site may let its own name point here.
    """

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(HEADERS)
        response.headers.setdefault("Cache-Control", "no-store")
        del response.headers["Server"]

    @web.middleware
    async def named(request: web.Request, handler: object) -> web.StreamResponse:
        if hosts and host_name(request.headers.get("Host", "")) not in hosts:
            return web.json_response({"error": "this server has another name"}, status=421)
        answer: web.StreamResponse = await handler(request)  # type: ignore[operator]
        return answer

    application.on_response_prepare.append(add)
    application.middlewares.insert(0, named)


def host_name(host: str) -> str:
    """A Host header without its port, in lower case.

    >>> host_name("LocalHost:8080"), host_name("[::1]:80")
    ('localhost', '[::1]')
    """
    name, colon, port = host.strip().lower().rpartition(":")
    return name if colon and port.isdigit() else host.strip().lower()

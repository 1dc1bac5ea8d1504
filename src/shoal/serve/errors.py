"""Errors of the server. `RequestError` carries the HTTP status and the fields of OpenAI's error object."""

from shoal.errors import ShoalError
from shoal.watch.page.guard import HttpError


class RequestError(HttpError):
    """A refused request. `param` is the invalid field; `kind` and `code` are OpenAI's `type` and `code`."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_s: int = 0,
    ) -> None:
        super().__init__(status, message, retry_s)
        self.param, self.code, self.kind = param, code, kind


class PromptError(RequestError):
    """The chat template cannot render these messages, or they exceed the model's context."""


class ReplyError(RequestError):
    """The file is not a reply file, or the generation cannot produce one."""


class UnknownVersionError(RequestError):
    """This server has no such version."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=404, param="model", code="model_not_found")


class NoSlotError(RequestError):
    """No version can be loaded now: all slots are in use, or the first version is still loading."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=503, kind="server_error", retry_s=2)


class BusyError(RequestError):
    """The server is at capacity. The client may retry after `retry_s`."""

    def __init__(self, message: str, retry_s: int) -> None:
        message = f"{message}; try again in {retry_s} s"
        super().__init__(message, status=429, kind="rate_limit_error", code="busy", retry_s=retry_s)


class ClientGoneError(ShoalError):
    """The client disconnected, so nobody needs the result."""

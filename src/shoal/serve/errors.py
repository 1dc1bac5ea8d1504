"""What a request may end with: one class for what is refused, with its HTTP status, and the kinds that are told apart."""

from shoal.errors import ShoalError
from shoal.watch.page.guard import HttpError


class RequestError(HttpError):
    """A request that cannot be answered as it asks. `param`: the field at fault; `kind` and `code`: OpenAI's words."""

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
    """Messages that the model's template cannot write, or that exceed its positions."""


class ReplyError(RequestError):
    """A file that is not a reply, or a generation that yields none."""


class UnknownVersionError(RequestError):
    """There is no such version here."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=404, param="model", code="model_not_found")


class NoPlaceError(RequestError):
    """All places for versions are in use, or none is loaded yet."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=503, kind="server_error", retry_s=2)


class BusyError(RequestError):
    """There is no place for a request now. `retry_s`: when there may be one."""

    def __init__(self, message: str, retry_s: int) -> None:
        words = f"{message}; try again in {retry_s} s"
        super().__init__(words, status=429, kind="rate_limit_error", code="busy", retry_s=retry_s)


class UnwantedError(ShoalError):
    """Whoever asked does not wait for the answer any more."""

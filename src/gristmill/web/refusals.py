"""What a client is told when its request is not answered.

    {"error": {"message": "…", "type": "invalid_request_error", "param": "top_p", "code": null}}

The form is OpenAI's, and so are the types. A message never holds a path of the server or a
traceback: those are in the server's own log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.base.errors import UserError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
RETRY_SECONDS = 1
"""When a client that found the queue full may come again."""


class RefusalError(Exception):
    """Why a request is not answered."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The answer, as JSON."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, kind),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> RefusalError:
    """The client's own mistake."""
    return RefusalError(400, message, param=param, code=code)


def unavailable(
    message: str, *, status: int = 503, code: str, seconds: int = RETRY_SECONDS
) -> RefusalError:
    """What may work later."""
    return RefusalError(status, message, code=code, headers={"Retry-After": str(seconds)})


def defect() -> RefusalError:
    """Anything that should not happen; the log of the server says what it was."""
    return RefusalError(500, "the server failed; its log says why", code="internal_error")


def bad_value(error: UserError, *, param: str) -> RefusalError:
    """A value that another part of the program refuses."""
    return bad_request("; ".join(problem.what for problem in error.problems), param=param)

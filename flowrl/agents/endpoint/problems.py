"""Errors of the endpoint, each in the shape of the API that was called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPENAI_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "gone_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
ANTHROPIC_TYPES = {**OPENAI_TYPES, 500: "api_error", 503: "overloaded_error"}


@dataclass(eq=False)
class ApiProblem(Exception):
    """What went wrong with a request; `status` is the HTTP status."""

    status: int
    message: str
    param: str | None = None
    """The field of the body."""
    code: str | None = None
    retry_after_s: int | None = None
    details: Mapping[str, Any] | None = None
    """What Anthropic's SDK reads from an error to continue on its own."""

    @property
    def headers(self) -> dict[str, str]:
        """The response's headers. Clients retry a 409 on their own, which is pointless here."""
        if self.retry_after_s is not None:
            return {"Retry-After": str(self.retry_after_s)}
        return {"x-should-retry": "false"} if self.status == 409 else {}

    def openai(self) -> Mapping[str, Any]:
        kind = OPENAI_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> Mapping[str, Any]:
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        details = {} if self.details is None else {"details": self.details}
        return {"type": "error", "error": {"type": kind, "message": self.message, **details}}


def invalid(param: str, message: str) -> ApiProblem:
    """A 400 that names the field."""
    return ApiProblem(400, message, param=param)

"""Errors as OpenAI's clients expect them: a status and `{"error": {...}}`."""

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

JSON = "application/json"


class ApiError(Exception):
    """A request that is refused.

    Attributes:
        status: HTTP status.
        message: what is wrong and the remedy.
        param: the field at fault, as a path (`messages[0].role`).
        code: OpenAI's name for the kind of error, where it has one.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status

    def body(self) -> dict[str, Any]:
        """The JSON object that is sent."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """The whole response."""
        return Response(msgspec.json.encode(self.body()), self.status, media_type=JSON)


INTERNAL = ApiError("the server failed; its log says why", status=500)
"""What a client is told of an error that is not its own."""


async def refuse(request: Request, error: Exception) -> Response:
    """Respond to an `ApiError`."""
    assert isinstance(error, ApiError)
    return error.response()


async def refuse_route(request: Request, error: Exception) -> Response:
    """Respond where there is no such route, or not for this method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    match error.status_code:
        case 404:
            message, code = f"there is no route {where}", "unknown_url"
        case 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message, code = f"{where} is not allowed; use {allowed}", "method_not_allowed"
        case _:
            message, code = error.detail, None
    response = ApiError(message, code=code, status=error.status_code).response()
    response.headers.update(error.headers or {})
    return response


async def fail(request: Request, error: Exception) -> Response:
    """Respond to an unexpected error, which the server then logs."""
    return INTERNAL.response()

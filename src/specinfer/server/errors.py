"""Every failure in OpenAI's shape, with its status."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from specinfer.errors import DrainingError, OverloadError, RequestError, SpecinferError
from specinfer.server.responses import Error, ErrorBody
from specinfer.server.schema import ChatBody, CompletionBody

logger = logging.getLogger(__name__)
FIELDS = CompletionBody.model_fields.keys() | ChatBody.model_fields.keys()
BAD_VALUE = 422
NOT_BAD_VALUES = ("unsupported", "json_invalid", "extra_forbidden", "missing", "too_long", "too_short")
"""Mistakes in a body that are no value of a wrong type: 400."""
STATUSES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


class ApiError(Exception):
    """What one request is answered with instead of a result."""

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
        self.status = status
        self.headers = dict(headers or {})
        default = "invalid_request_error" if status < 500 else "server_error"
        kind = "rate_limit_error" if status == 429 else STATUSES.get(status, default)
        self.body = ErrorBody(error=Error(message=message, type=kind, param=param, code=code))

    def json(self) -> str:
        """The body; ASCII only, since a message may quote what is no Unicode."""
        return self.body.model_dump_json(ensure_ascii=True)

    def response(self) -> Response:
        """As a whole answer."""
        return Response(self.json(), self.status, self.headers, media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """What an error of any kind is to its client. What nobody expected is named in the log alone."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadError):
        headers = {"Retry-After": str(error.retry_after)}
        return ApiError(429, str(error), code="queue_full", headers=headers)
    if isinstance(error, DrainingError):
        return ApiError(503, str(error), code="draining", headers={"Retry-After": "5"})
    if isinstance(error, RequestError):
        word = re.split(r"[ .:\[]", error.message, maxsplit=1)[0]
        return ApiError(400, str(error), param=word if word in FIELDS else None)
    if isinstance(error, SpecinferError):
        return ApiError(500, str(error))
    if isinstance(error, RequestValidationError):
        return invalid_fields(error.errors(), depth=1)
    if isinstance(error, ValidationError):
        return invalid_fields(error.errors(), depth=0)
    if isinstance(error, TimeoutError):
        return ApiError(408, "the request took longer than the server allows", code="timeout")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed to answer this request")


def invalid_fields(errors: Sequence[Mapping[str, Any]], depth: int) -> ApiError:
    """One mistake of pydantic's list, by field; the client's own input is not repeated. Where a field takes
    several types, the mistake within the right one says more than that it is none of the others.

    depth: parts of a mistake's place before the field.
    """
    first = next((e for e in errors if e["type"] in NOT_BAD_VALUES), errors[0])
    kind, message = str(first["type"]), str(first["msg"])
    path = [str(part) for part in first["loc"][depth:]]
    field = path[0] if path and kind != "json_invalid" else None
    if kind == "extra_forbidden":
        message = f"unknown field {'.'.join(path)!r}"
    elif kind == "json_invalid":
        message = "the body is not valid JSON"
    elif field is not None:
        message = f"{field}: {message}"
    else:
        message = "the body must be a JSON object, sent with Content-Type: application/json"
    return ApiError(400 if kind in NOT_BAD_VALUES else BAD_VALUE, message, param=field)


def add_error_handlers(app: FastAPI) -> None:
    """Let every error of the app go out in this shape."""

    async def handle(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    for kind in (ApiError, SpecinferError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)

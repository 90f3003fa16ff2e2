"""A call that a server refused, as grpc raises it."""

from __future__ import annotations

from typing import Any

import grpc

from redfence_proto.rich_error import RichError, to_trailing_metadata


class FailedCall(grpc.RpcError):
    """An error that is a call; without a `rich` error only code and details are told."""

    def __init__(self, code: grpc.StatusCode, rich: RichError | None = None, *, details: str = "") -> None:
        super().__init__()
        self._code, self._rich, self._details = code, rich, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details if self._rich is None else self._rich.message

    def trailing_metadata(self) -> Any:
        return () if self._rich is None else to_trailing_metadata(self._code.value[0], self._rich)

"""Recognize the error that grpcio raises where it cannot send, because the caller has ended its call."""

from __future__ import annotations

from typing import Final

import grpc

# The class of this error is private to grpcio. With another text, the class tells of a wrong use.
_NOT_SENT: Final = 'Failed "execute_batch"'


def caller_has_left(error: BaseException | None) -> bool:
    """Tell whether a call ended while grpcio was sending to its caller.

    The caller cancelled the call, its deadline came, or its connection broke.
    """
    return isinstance(error, grpc.aio.InternalError) and str(error).startswith(_NOT_SENT)

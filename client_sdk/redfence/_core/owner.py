"""Remembers which process uses a client, because a forked child has no part of it."""

from __future__ import annotations

import os

from redfence._errors import ClosedError


class Owner:
    """The process that first uses a client."""

    __slots__ = ("_process",)

    def __init__(self) -> None:
        self._process = 0

    @property
    def is_parent(self) -> bool:
        """Whether another process used the client before it forked this process."""
        return self._process not in {0, os.getpid()}

    @property
    def is_this_process(self) -> bool:
        """Whether this process has used the client."""
        return self._process == os.getpid()

    def claim(self) -> None:
        """Record that this process uses the client.

        Raises:
            ClosedError: a parent of this process used it first.
        """
        if self.is_parent:
            raise ClosedError(
                f"this client belongs to process {self._process}, which forked process {os.getpid()}; "
                "connect no redfence client before the fork, or start processes by spawn"
            )
        self._process = os.getpid()

"""Let a stream parse a large message in its turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Large:
    """Takes the place of a message of a stream that takes long to parse.

    Attributes:
        parse: returns the message, or what a read returns in its place if it is malformed.
    """

    __slots__ = ("parse",)

    def __init__(self, parse: Callable[[], Any]) -> None:
        self.parse = parse

    def then(self, use: Callable[[Any], Any]) -> Large:
        """Return one whose `parse` returns what `use` makes of the message."""
        return Large(lambda: use(self.parse()))

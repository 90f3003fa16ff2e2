"""Define the decorator of the small values that every command makes by the dozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

Value = TypeVar("Value")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[Value]) -> type[Value]:
    """Make a dataclass with slots that the type checker treats as frozen.

    A frozen dataclass sets each field by a call of `object.__setattr__`, which takes four times as long. No
    code changes a value; `mypy` holds that.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)

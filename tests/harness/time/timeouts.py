"""The node timeout of tests that are not about silent nodes."""

from __future__ import annotations

from typing import Final

# With the default of 500 ms a stall of the disk or the machine would fail tests of other things.
NODE_TIMEOUT_MS: Final = 5_000

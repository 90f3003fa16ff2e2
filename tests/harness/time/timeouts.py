"""How long nodes are waited for by tests that are not about waiting for nodes."""

from __future__ import annotations

from typing import Final

# The default would be 500 ms. A disk or a machine that stands still for longer fails calls, as it should, and tests of other things.
NODE_TIMEOUT_MS: Final = 5_000

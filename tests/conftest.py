"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes depends on what else the machine does; pytest's timeout ends what hangs.
settings.register_profile("flowrl", deadline=None)
settings.load_profile("flowrl")

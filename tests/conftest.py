"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no fault of the code: examples have no deadline, tests have theirs.
settings.register_profile("everstep", deadline=None)
settings.load_profile("everstep")

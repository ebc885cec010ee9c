"""What the tests of several ops share."""

from __future__ import annotations

import jaxtyping
import pytest


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of any shape, as in a user's process: annotations are not checked."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)

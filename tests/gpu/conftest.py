"""Tests here run where JAX's default device is a GPU, and are skipped elsewhere."""

from pathlib import Path

import jax
import pytest

HERE = Path(__file__).resolve().parent


@pytest.hookimpl(tryfirst=True)  # before pytest's own hook, which selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The hook is called with the items of the whole run.
    here = [item for item in items if item.path.is_relative_to(HERE)]
    if not here:
        return
    backend = jax.default_backend()
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if backend != "gpu":
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU, JAX's default is {backend}"))

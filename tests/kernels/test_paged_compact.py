"""Page compaction, every implementation against a loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deinfer_kernels import paged_compact
from deinfer_kernels.paged_compact import api

compact = jax.jit(paged_compact, static_argnames="implementation")


@pytest.fixture(params=list(api.IMPLEMENTATIONS))
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


def pool(
    pages: int = 11, page_size: int = 7, width: int = 13, dtype: str = "float32"
) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.asarray(jnp.asarray(rng.standard_normal((pages, page_size, width)), dtype))


def copies(*runs: tuple[int, int, int], size: int) -> np.ndarray:
    return np.array([*runs, *[(0, 0, 0)] * (size - len(runs))], np.int32).reshape(size, 3)


class TestPagedCompact:
    def check(self, pages: np.ndarray, runs: np.ndarray, implementation: str) -> None:
        found = compact(jnp.asarray(pages), jnp.asarray(runs), implementation=implementation)
        assert found.shape == (len(runs), *pages.shape[1:]) and found.dtype == pages.dtype
        live = 0
        for first, count, destination in runs.tolist():
            for index in range(count):
                page = np.asarray(found[destination + index])
                np.testing.assert_array_equal(page, pages[first + index])
                live += 1
        assert np.isfinite(np.asarray(found[live:], np.float32)).all()

    @pytest.mark.parametrize(
        "runs",
        [
            [(4, 1, 0)],
            [(0, 11, 0)],
            [(7, 2, 0), (3, 1, 2)],
            [(0, 1, 0), (2, 3, 1), (6, 1, 4), (8, 3, 5)],
            [(10, 1, 0), (9, 1, 1), (8, 1, 2)],
        ],
        ids=str,
    )
    @pytest.mark.parametrize("spare", [0, 5])
    def test_runs(self, implementation: str, runs: list, spare: int) -> None:
        live = sum(count for _, count, _ in runs)
        self.check(pool(), copies(*runs, size=live + spare), implementation)

    def test_nothing_alive(self, implementation: str) -> None:
        self.check(pool(), copies(size=4), implementation)

    def test_an_empty_buffer(self, implementation: str) -> None:
        self.check(pool(), copies(size=0), implementation)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision(self, implementation: str, dtype: str) -> None:
        self.check(pool(dtype=dtype), copies((7, 2, 0), (3, 1, 2), size=5), implementation)

    @pytest.mark.parametrize("width", [1, 64, 131])
    def test_widths(self, implementation: str, width: int) -> None:
        self.check(pool(width=width), copies((1, 2, 0), size=3), implementation)

    def test_pages_that_nobody_names_may_be_anything(self, implementation: str) -> None:
        # Page 0 too, which padding rows name.
        pages = np.full_like(pool(), np.nan)
        pages[5] = 1.0
        self.check(pages, copies((5, 1, 0), size=4), implementation)


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    @pytest.mark.parametrize("shape", [(4, 2), (4, 4), (3,)])
    def test_copies(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"copies \[C, 3\], got \(11, 7, 13\) and"):
            api.paged_compact(jnp.asarray(pool()), jnp.zeros(shape, jnp.int32))

    def test_unknown_implementation(self) -> None:
        with pytest.raises(ValueError, match="got 'triton'"):
            api.paged_compact(
                jnp.asarray(pool()), jnp.asarray(copies(size=2)), implementation="triton"
            )

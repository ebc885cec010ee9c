"""Which implementation of an op runs."""

from __future__ import annotations

import pytest

from deinfer_kernels.dispatch import check_implementation, dispatch


def refuses(x: int) -> str:
    raise NotImplementedError(f"not for {x}")


def wrong_caller(x: int) -> str:
    raise ValueError(f"bad x {x}")


def reference(x: int) -> str:
    return f"reference {x}"


def fast(x: int) -> str:
    return f"fast {x}"


def test_none_takes_the_first() -> None:
    assert dispatch("op", {"mosaic_gpu": fast, "reference": reference}, None, 3) == "fast 3"


def test_none_goes_on_where_one_does_not_apply() -> None:
    assert dispatch("op", {"mosaic_gpu": refuses, "reference": reference}, None, 3) == "reference 3"


def test_none_passes_the_callers_error_on() -> None:
    with pytest.raises(ValueError, match="bad x 3"):
        dispatch("op", {"mosaic_gpu": wrong_caller, "reference": reference}, None, 3)


def test_none_lists_every_reason_where_nothing_applies() -> None:
    both = {"mosaic_gpu": refuses, "reference": refuses}
    with pytest.raises(NotImplementedError, match="op.*mosaic_gpu: not for 3; reference: not for"):
        dispatch("op", both, None, 3)


def test_a_name_takes_that_one() -> None:
    both = {"mosaic_gpu": fast, "reference": reference}
    assert dispatch("op", both, "reference", 3) == "reference 3"


def test_a_name_never_falls_back() -> None:
    with pytest.raises(NotImplementedError, match="not for 3"):
        dispatch("op", {"mosaic_gpu": refuses, "reference": reference}, "mosaic_gpu", 3)


def test_a_name_that_the_op_lacks() -> None:
    with pytest.raises(NotImplementedError, match="op.*'mosaic_gpu' does not exist.*reference"):
        dispatch("op", {"reference": reference}, "mosaic_gpu", 3)


def test_an_unknown_name() -> None:
    with pytest.raises(ValueError, match="'reference', 'mosaic_gpu' or None, got 'triton'"):
        dispatch("op", {"reference": reference}, "triton", 3)


@pytest.mark.parametrize("name", ["reference", "mosaic_gpu", None])
def test_known_names_pass_the_check(name: str | None) -> None:
    check_implementation(name)


def test_the_check_refuses_an_unknown_name() -> None:
    with pytest.raises(ValueError, match="got 'cuda'"):
        check_implementation("cuda")

"""Choice of an implementation by name, the same for every op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, get_args

__all__ = ["Implementation", "check_implementation", "dispatch"]

Implementation = Literal["reference", "mosaic_gpu"]


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError unless ``implementation`` is a known name or None (= the best that
    applies)."""
    if implementation is not None and implementation not in get_args(Implementation):
        known = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"implementation: expected {known} or None, got {implementation!r}")


def dispatch[Result](
    op: str,
    implementations: Mapping[str, Callable[..., Result]],
    implementation: str | None,
    *args: object,
    **kwargs: object,
) -> Result:
    """Runs ``op`` with the named implementation, or with the first that takes the arguments.

    Args:
        op: name of the op, for messages.
        implementations: by name, fastest first. One that does not cover these arguments raises
            NotImplementedError, which means "try the next"; ValueError means that the caller is
            wrong and is passed on.
        implementation: a name, which then never falls back, or None.

    Raises:
        NotImplementedError: the named implementation does not exist for this op or does not take
            these arguments.
    """
    check_implementation(implementation)
    if implementation is not None:
        if implementation not in implementations:
            raise NotImplementedError(
                f"{op}: implementation {implementation!r} does not exist; available: "
                f"{', '.join(implementations)}"
            )
        return implementations[implementation](*args, **kwargs)
    reasons = []
    for name, run in implementations.items():
        try:
            return run(*args, **kwargs)
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
    raise NotImplementedError(
        f"{op}: no implementation takes these arguments ({'; '.join(reasons)})"
    )

"""Where a program's time goes on one GPU, kernel by kernel."""

from __future__ import annotations

import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

__all__ = ["UNCAPTURED", "kernel_times"]

Row = dict[str, Any]
CALLS = 4
UNCAPTURED = {"xla_gpu_enable_command_buffer": ""}  # to compile with: kernels are launched by name
KINDS = {  # by names of kernels and of HLO operations; the first that fits
    "collectives": r"nccl|all-reduce|all-gather|reduce-scatter|psum|fusion-start|all_reduce",
    "attention": r"fmha|attention|sdpa|flash",
    "products": r"gemm|gemv|nvjet|cublas|cutlass|splitk|\bdot",
}


def kernel_times(step: Callable[..., Any], state: Any, layers: int) -> Row:
    """Microseconds a layer on the first GPU, by kind, and of the operations that take longest.

    Args:
        step: takes what it gave the last time.
        state: what it takes the first time, which is donated.
        layers: of the program.

    Raises:
        ValueError: the profiler saw no kernel.
    """
    state = jax.block_until_ready(step(*state))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                state = jax.block_until_ready(step(*state))
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    spent: dict[tuple[str, str], float] = defaultdict(float)
    launches: Counter[tuple[str, str]] = Counter()
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU:0"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # the other lines say the same by operation or module
            for event in line.events:
                stats = {name: value for name, value in event.stats if name is not None}
                operation = re.sub(r"[.\d]+$", "", str(stats.get("hlo_op", "")))
                spent[operation, event.name[:80]] += event.duration_ns / 1e3
                launches[operation, event.name[:80]] += 1
    if not spent:
        raise ValueError("expected kernels in the profile, got none")
    part = 1 / CALLS / layers
    kinds: dict[str, float] = dict.fromkeys((*KINDS, "rest"), 0.0)
    for (operation, kernel), us in spent.items():
        text = f"{operation} {kernel}".lower()
        kinds[next((k for k, words in KINDS.items() if re.search(words, text)), "rest")] += us
    longest = sorted(spent, key=lambda key: -spent[key])[:30]
    return {
        "us_a_layer": {kind: round(us * part, 2) for kind, us in kinds.items()},
        "launches_a_layer": launches.total() * part,
        "longest": [
            {
                "operation": operation,
                "kernel": kernel,
                "us_a_layer": round(spent[operation, kernel] * part, 2),
                "launches_a_layer": launches[operation, kernel] * part,
            }
            for operation, kernel in longest
        ],
    }

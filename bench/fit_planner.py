"""Where the planner's figures of "h200", "nvlink" and "pcie" come from: a fit to measured times.

The data are bench.tensor_parallel's of 70B layers on two GPUs with and without a fast link, and, in
bench/measured.py, the products of an 8B layer on one. Prints the parameters, to be written into
deinfer_jax/planner/speeds.py, and how far each prediction is off.

    python -m bench.fit_planner
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
from scipy.optimize import least_squares

from bench import measured
from deinfer_jax.planner import DEVICES, LINKS, Device, Link

# Parameter, bounds. Latencies in s, bandwidths in bytes/s.
DEVICE_BOUNDS = {
    "read": (0.6, 0.95),
    "compute": (0.5, 1.0),
    "overlap": (1.0, 8.0),
    "product": (2e-6, 1.2e-5),
    "cache_read": (0.15, 0.9),
    "kernel": (1e-6, 5e-6),
}
LINK_BOUNDS = {
    "nvlink": {"bandwidth": (1e11, 4e11), "latency": (4e-6, 4e-5), "small_latency": (2e-6, 2e-5)},
    "pcie": {"bandwidth": (1e10, 6e10), "latency": (2e-6, 4e-5), "small_latency": (1e-6, 2e-5)},
}
CLEAR = 1.1  # measured times that differ by more have to come out in the same order
MARGIN = 0.01  # of logarithms, by which orders should hold
Speeds = tuple[Device, dict[str, Link]]
CELLS = measured.measured()


def names() -> list[tuple[str, str]]:
    """Owner and name of every parameter."""
    found = [("device", name) for name in DEVICE_BOUNDS]
    return found + [(link, name) for link, bounds in LINK_BOUNDS.items() for name in bounds]


def bounds(owner: str, name: str) -> tuple[float, float]:
    return DEVICE_BOUNDS[name] if owner == "device" else LINK_BOUNDS[owner][name]


def speeds(values: np.ndarray) -> Speeds:
    """Device and links with these (logarithms of) parameters."""
    device, links = DEVICES["h200"], dict(LINKS)
    for (owner, name), value in zip(names(), np.exp(values), strict=True):
        if owner == "device":
            device = replace(device, **{name: float(value)})
        else:
            links[owner] = replace(links[owner], **{name: float(value)})
    return device, links


def predicted(device: Device, links: dict[str, Link]) -> dict[tuple[str, str, str], float]:
    """Milliseconds a layer by link, strategy and situation."""
    found = {}
    for link, strategies in measured.DESIGN.items():
        for strategy in strategies:
            one = measured.predictor(strategy, device=device, link=links[link])
            for situation in measured.SITUATIONS:
                found[link, strategy, situation.name] = 1e3 * one.layers_seconds(
                    batch=situation.batch, context=situation.context, prompt=situation.prompt
                )
    return found


def residuals(values: np.ndarray) -> np.ndarray:
    device, links = speeds(values)
    times = predicted(device, links)
    logs = {cell: math.log(times[cell] / true) for cell, true in CELLS.items()}
    products = [
        math.log(1e6 * measured.product_seconds(kind, rows, device) / true)
        for kind, by_rows in measured.PRODUCTS_8B.items()
        for rows, true in by_rows.items()
    ]
    steps = [
        math.log(1e3 * measured.step_seconds(*step, device) / true)
        for step, true in measured.STEPS_8B.items()
    ]
    # Orders weigh as much as it takes for them to hold.
    broken = [max(0.0, MARGIN - math.log(times[slow] / times[fast])) for fast, slow in orders()]
    return np.array([*logs.values(), *products, *steps, *(20 * r for r in broken)])


def orders() -> Iterator[tuple[tuple[str, str, str], tuple[str, str, str]]]:
    """Cells of which the first has to be predicted faster than the second."""
    for fast, slow in itertools.permutations(CELLS, 2):
        if (fast[0], fast[2]) != (slow[0], slow[2]) or CELLS[fast] >= CELLS[slow]:
            continue
        if CELLS[slow] / CELLS[fast] > CLEAR or chosen(fast, slow):
            yield fast, slow


def chosen(fast: tuple[str, str, str], slow: tuple[str, str, str]) -> bool:
    """Whether it decides what is advised: the fastest against all others where rows are many, the
    fastest against dense with a fast link. (Without one, and with few rows, dense and the best of
    the others are within 8 % of each other, and no parameters tell them apart.)"""
    link, _, situation = fast
    here = [cell for cell in CELLS if (cell[0], cell[2]) == (link, situation)]
    if fast != min(here, key=CELLS.__getitem__):
        return False
    many = situation in ("decode 512", "prefill 16384")
    return many or (link == "nvlink" and "dense" in (fast[1], slow[1]))


def main() -> None:
    start, device, links = [], DEVICES["h200"], LINKS
    for owner, name in names():
        value = getattr(device if owner == "device" else links[owner], name)
        start.append(math.log(np.clip(value, *bounds(owner, name))))
    limits = np.log([bounds(*name) for name in names()]).T
    limits += [[-1e-9], [1e-9]]
    # From several starts, since a maximum of two times has kinks.
    rng, best = np.random.default_rng(0), None
    for attempt in range(6):
        first = np.array(start) + (rng.normal(size=len(start)) * 0.2 if attempt else 0.0)
        fit = least_squares(residuals, np.clip(first, *limits), bounds=tuple(limits), x_scale=0.1)
        if best is None or fit.cost < best.cost:
            best = fit
    assert best is not None
    device, links = speeds(best.x)
    for owner, found in (("h200", device), ("nvlink", links["nvlink"]), ("pcie", links["pcie"])):
        values = {f.name: getattr(found, f.name) for f in fields(found)}
        print(owner, {k: float(f"{v:.3g}") for k, v in values.items() if isinstance(v, float)})
    times = predicted(device, links)
    for cell, true in CELLS.items():
        print(
            f"{' '.join(cell):32} {times[cell]:8.3f} {true:8.3f} ms {times[cell] / true - 1:+6.1%}"
        )
    for kind, by_rows in measured.PRODUCTS_8B.items():
        for rows, true in by_rows.items():
            time = 1e6 * measured.product_seconds(kind, rows, device)
            print(
                f"8B products {kind} {rows:>5} {time:8.1f} {true:8.1f} µs {time / true - 1:+6.1%}"
            )
    for step, true in measured.STEPS_8B.items():
        time = 1e3 * measured.step_seconds(*step, device)
        print(f"8B step {step} {time:.3f} {true:.3f} ms {time / true - 1:+.1%}")
    for kind in ("latent", "full+latent"):
        print(f"8B step {kind} {1e3 * measured.step_seconds(64, 512, device, kind):.3f} ms")
    for fast, slow in orders():
        if times[fast] >= times[slow]:
            print("wrong order:", fast, slow)


if __name__ == "__main__":
    main()

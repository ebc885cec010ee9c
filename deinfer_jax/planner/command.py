"""``deinfer plan``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax

from deinfer_jax.planner.measure import measure_link
from deinfer_jax.planner.predict import plan
from deinfer_jax.planner.report import Plan
from deinfer_jax.planner.speeds import Link

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Prints the plan; returns 0, or 1 where nothing fits.

    Args:
        args: ``model``, ``devices``, ``link``, ``measure``, ``batch``, ``context``, ``prompt``,
            ``dtype``, ``memory`` (GB), ``device``, ``kv_cache``, ``objective``, ``multiply_out``
            and ``json`` (a file).
    """
    if args.memory is not None and not args.memory > 0:
        raise ValueError(f"--memory: expected GB > 0, got {args.memory:g}")

    def planned(link: str | Link) -> Plan:
        return plan(
            args.model,
            devices=args.devices,
            link=link,
            batch=args.batch,
            context=args.context,
            prompt=args.prompt,
            dtype=args.dtype,
            memory=None if args.memory is None else max(1, int(args.memory * 1e9)),
            device=args.device,
            kv_cache=args.kv_cache,
            objective=args.objective,
            multiply_out=args.multiply_out,
        )

    found = planned(args.link)  # also with --measure, as it checks the arguments
    if args.measure:
        link = measure_link(args.devices)
        visible = jax.device_count()
        if visible < args.devices:
            print(
                f"--measure: only {visible} of {args.devices} devices are visible; the link was "
                "measured between those"
            )
        if jax.devices()[0].platform == "cpu":
            print("--measure: these are simulated devices; their link says nothing about GPUs")
        found = planned(link)
    print(found)
    if args.json:
        Path(args.json).write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    return 0 if found.choice else 1

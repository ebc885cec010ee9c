"""A second process finds the first one's programs on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import jax
import deinfer_jax

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
config = deinfer_jax.ModelConfig(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=16, max_position=128,
)
with deinfer_jax.load(config) as llm:
    before = len([hit for hit in hits if hit == "/jax/compilation_cache/cache_hits"])
    deinfer_jax.generate(llm, [3, 4, 5], max_new_tokens=3)
    after = len([hit for hit in hits if hit == "/jax/compilation_cache/cache_hits"])
    print(llm.runner.compilations, after - before, jax.config.jax_compilation_cache_dir)
"""


def run(folder: Path | str) -> tuple[int, int, str]:
    env = {**os.environ, "DEINFER_COMPILATION_CACHE": str(folder), "JAX_PLATFORMS": "cpu"}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
    )
    compiled, hits, cache = done.stdout.split()
    return int(compiled), int(hits), cache


def test_programs_are_kept_on_disk(tmp_path: Path) -> None:
    assert run(tmp_path) == (2, 0, str(tmp_path))  # prefill and decode
    kept = set(tmp_path.iterdir())
    assert kept
    assert run(tmp_path) == (2, 2, str(tmp_path))
    assert {path for path in tmp_path.iterdir() if path.name.endswith("-cache")} <= kept


def test_an_empty_name_switches_it_off() -> None:
    assert run("") == (2, 0, "None")

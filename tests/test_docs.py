"""The examples of the documentation run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import deinfer_jax
from deinfer_jax.evaluate.communication import collectives, layer_program
from tests import tiny

DOCS = Path(__file__).resolve().parent.parent / "docs"


def blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.M | re.S)


def test_a_strategy_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="tiny models are made by transformers")
    model = tiny.make("gqa", tmp_path / "dense")
    path = tmp_path / "m"
    tiny.decompose(model, tmp_path / "dense", path, tiny.groups("separate", "shared"))
    names: dict[str, Any] = {"path": path}
    own, counting = blocks("strategies.md")
    exec(compile(own, "docs/strategies.md", "exec"), names)
    assert names["llm"].strategy.name == "whole_v" and names["llm"].strategy.devices == 2
    with deinfer_jax.load(path, kv_cache="latent") as alone:
        (expected,) = deinfer_jax.generate(alone, [5, 6, 7, 8], max_new_tokens=8, ignore_eos=True)
    assert names["done"].token_ids == expected.token_ids

    exec(compile(counting, "docs/strategies.md", "exec"), names)
    found = collectives(layer_program(names["llm"].config, "whole_v", 2, tokens=1))
    assert [one.kind for one in found] == ["all-reduce", "all-reduce"]
    slices = names["llm"].config.low_rank
    ranks = [slices.get(f"model.layers.0.{m}_proj").rank for m in ("self_attn.o", "mlp.down")]
    padded = [-(-rank // 8) * 8 for rank in ranks]
    assert [list(one.elements) for one in found] == [[rank] for rank in padded]
    assert capsys.readouterr().out.count("all-reduce") == 2

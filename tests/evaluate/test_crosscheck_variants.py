"""Random models without a checkpoint: each loads and says what its name says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import deinfer_jax
from deinfer_jax.checkpoint import open_checkpoint
from deinfer_jax.evaluate.crosscheck.trace import Trace
from deinfer_jax.evaluate.crosscheck.variants import LAYOUTS, VARIANTS, random_config, write_random
from tests import tiny

NAMES = sorted(
    {*(f"{variant}/mixed" for variant in VARIANTS), *(f"biases/{layout}" for layout in LAYOUTS)}
)


def test_there_is_every_variant_of_the_other_tests() -> None:
    missing = set(tiny.VARIANTS) - set(VARIANTS)
    assert missing == {"rope-yarn-mscale", "qwen3-biases"}  # combinations of others


@pytest.mark.parametrize("name", NAMES)
def test_loads_as_it_was_meant(name: str, tmp_path: Path) -> None:
    config = write_random(name, tmp_path / "model")
    assert open_checkpoint(tmp_path / "model").config == config == random_config(name)
    own = {"rope-dynamic-longer", "rope-divisors", "mixed-windows"}  # what only we can say
    assert ("deinfer" in config.to_hf()) == (name.partition("/")[0] in own)
    with deinfer_jax.load(tmp_path / "model", max_batch=2) as llm:
        assert llm.config == config


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) & set(tiny.VARIANTS)))
def test_variant_is_what_transformers_means_by_it(variant: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="tiny.make uses transformers' torch models")
    tiny.make(variant, tmp_path, num_hidden_layers=3)
    theirs = open_checkpoint(tmp_path).config
    assert random_config(f"{variant}/dense") == theirs.replace(dtype="float32")


def test_groups_of_the_layouts() -> None:
    def groups(layout: str) -> list[set[str]]:
        found = random_config(f"gqa/{layout}").low_rank.groups()
        return [{module.rpartition(".")[2] for module in members} for members, _ in found]

    assert all(len(group) == 1 for group in groups("separate"))
    assert {"q_proj", "k_proj", "v_proj"} in groups("shared")
    assert {"k_proj", "v_proj"} in groups("shared-kv")
    assert groups("dense") == []
    assert random_config("gqa") == random_config("gqa/separate")
    mixed = random_config("gqa/mixed")
    assert len(mixed.low_rank.slices) < len(mixed.linears())


def test_weights_hide_nothing(tmp_path: Path) -> None:
    write_random("biases/shared", tmp_path / "model", seed=3)
    tensors = dict(open_checkpoint(tmp_path / "model").tensors())
    stream = tensors["model.embed_tokens.weight"].std()
    for name, array in tensors.items():
        if array.ndim == 1:  # o and down write the stream, the others read what is normed
            written = "o_proj" in name or "down_proj" in name
            assert array.std() > (stream / 10 if written else 0.1), name
    v = tensors["model.layers.0.self_attn.q_k_v.v.weight"]
    u = tensors["model.layers.0.self_attn.q_proj.u.weight"]
    assert (u @ v).std() == pytest.approx(48**-0.5, rel=0.5)


def test_layers_are_a_good_part_of_the_residual_stream(tmp_path: Path) -> None:
    write_random("gqa/shared", tmp_path / "model")
    with deinfer_jax.load(tmp_path / "model", max_batch=2, dtype="float32") as llm:
        hidden, _ = Trace(llm, np.arange(6, dtype=np.int32)[None]).prefill(
            0, np.arange(0, 160, 3, dtype=np.int32)
        )
    first, last = hidden[0], hidden[-1]
    added = np.linalg.norm(last - first) / np.linalg.norm(first)
    assert 0.8 < added < 2  # else a broken layer is not seen, or half precision's rounding is all


def test_words_follow_those_of_a_kind(tmp_path: Path) -> None:
    write_random("gqa", tmp_path / "model")
    tensors = dict(open_checkpoint(tmp_path / "model").tensors())
    logits = tensors["model.embed_tokens.weight"] @ tensors["lm_head.weight"].T
    best, kinds = logits.argmax(axis=1), np.arange(160) // 4
    assert (best // 4 == (kinds + 1) % 40).mean() > 0.9
    assert len({*best % 4}) == 4  # any of a kind may be the one


def test_follows_the_seed(tmp_path: Path) -> None:
    found = []
    for index, seed in enumerate((0, 0, 1)):
        write_random("gqa", tmp_path / str(index), seed=seed)
        tensors = dict(open_checkpoint(tmp_path / str(index)).tensors())
        found.append(tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != found[2]).any()


@pytest.mark.parametrize("name", ["llama", "gqa/", "gqa/other", "gqa/shared/x", ""])
def test_unknown_names(name: str) -> None:
    if name == "gqa/":
        assert random_config(name) == random_config("gqa")
        return
    with pytest.raises(ValueError, match=r"expected VARIANT or VARIANT/LAYOUT .*qwen3 .*mixed"):
        random_config(name)

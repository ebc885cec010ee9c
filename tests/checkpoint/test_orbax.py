"""A model is saved from any strategy and number of devices, and restored onto any other."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import deinfer_jax
from deinfer_jax.checkpoint import open_checkpoint
from deinfer_jax.checkpoint.factors import low_rank_of
from deinfer_jax.checkpoint.orbax_writer import save_orbax
from deinfer_jax.checkpoint.parameters import nested, read_part
from deinfer_jax.layers.parameter import Declaration, declarations
from deinfer_jax.models import build
from deinfer_jax.parallel.mesh import choose_placement
from deinfer_jax.parallel.strategies import get_strategy
from tests import tiny

pytest.importorskip("torch")

OPTIONS: dict[str, Any] = dict(max_batch=2, max_context=32, page_size=16, cache_bytes=1 << 16)
TOKENS = tiny.random_tokens(20)
VARIANTS = ("gqa", "biases", "qwen3", "nine-three-heads")
LAYOUTS = ("separate", "shared", "dense-k-o-down")
Placed = tuple[str, int]  # strategy and devices


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("orbax")
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def original(folder: Path) -> Any:
    """The canonical checkpoint of a variant, decomposed by other groups in every layer."""

    @cache
    def make(variant: str) -> Path:
        path = folder / variant
        model = tiny.make(variant, path / "dense", num_hidden_layers=len(LAYOUTS))
        tiny.decompose(model, path / "dense", path / "factors", tiny.groups(*LAYOUTS))
        return path / "factors"

    return make


@pytest.fixture(scope="session")
def saved(folder: Path, original: Any) -> Any:
    """What a variant's model saves under a strategy on so many devices."""

    @cache
    def save(variant: str, strategy: str, devices: int) -> Path:
        with load(original(variant), strategy, devices) as llm:
            return llm.save(folder / f"{variant}-{strategy}-{devices}")

    return save


@pytest.fixture(scope="session")
def logits(original: Any) -> Any:
    """Of a variant's original checkpoint on one device, as factors or multiplied out, which is
    rounded otherwise."""

    @cache
    def run(variant: str, dense: bool = False) -> np.ndarray:
        with load(original(variant), "dense" if dense else "low_rank", 1) as llm:
            return llm.logits(TOKENS)

    return run


def load(path: Path, strategy: str, devices: int, **options: Any) -> deinfer_jax.LLM:
    return deinfer_jax.load(path, strategy=strategy, tensor_parallel=devices, **(OPTIONS | options))


def tensors(path: Path) -> dict[str, np.ndarray]:
    return dict(open_checkpoint(path).tensors())


def assert_same(found: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        mine = np.asarray(found[name])
        assert (mine.dtype, mine.shape) == (array.dtype, array.shape), name
        assert mine.tobytes() == array.tobytes(), name


def check_saved(path: Path, original: Path) -> None:
    assert_same(tensors(path), tensors(original))
    assert open_checkpoint(path).config == open_checkpoint(original).config


def check_restored(path: Path, original: Path, placed: Placed) -> None:
    with load(path, *placed) as llm, load(original, *placed) as other:
        mine, theirs = (jax.tree.leaves_with_path(x.runner.weights) for x in (llm, other))
        for (where, array), (place, expected) in zip(mine, theirs, strict=True):
            assert where == place and array.sharding == expected.sharding
            np.testing.assert_array_equal(np.asarray(array), np.asarray(expected), str(where))


def check_logits(llm: deinfer_jax.LLM, expected: np.ndarray) -> None:
    # Float32 sums in another order, by device: measured up to 1.05e-6 of the largest.
    largest = float(np.abs(expected).max())
    np.testing.assert_allclose(llm.logits(TOKENS), expected, rtol=0, atol=2e-6 * largest)


@pytest.mark.parametrize(
    ("variant", "strategy", "devices"),
    [
        ("gqa", "low_rank", 1),
        ("gqa", "low_rank", 8),
        ("gqa", "sharded", 4),
        ("biases", "sharded", 2),
        ("qwen3", "naive", 3),
        ("nine-three-heads", "sharded", 3),
        ("nine-three-heads", "low_rank", 8),
    ],
)
def test_saved_tensors_are_the_originals(
    variant: str, strategy: str, devices: int, saved: Any, original: Any
) -> None:
    check_saved(saved(variant, strategy, devices), original(variant))


@pytest.mark.parametrize(
    ("variant", "source", "target"),
    [
        ("gqa", ("sharded", 4), ("low_rank", 1)),
        ("gqa", ("sharded", 4), ("low_rank", 8)),
        ("gqa", ("low_rank", 1), ("naive", 4)),
        ("biases", ("sharded", 2), ("low_rank", 3)),
        ("qwen3", ("naive", 3), ("sharded", 4)),
        ("nine-three-heads", ("low_rank", 8), ("sharded", 2)),
        ("nine-three-heads", ("sharded", 3), ("low_rank", 4)),
    ],
)
def test_restored_parameters_are_those_of_the_original(
    variant: str, source: Placed, target: Placed, saved: Any, original: Any
) -> None:
    check_restored(saved(variant, *source), original(variant), target)


def test_logits_after_restoring(saved: Any, logits: Any) -> None:
    with load(saved("gqa", "sharded", 4), "low_rank", 2) as llm:
        check_logits(llm, logits("gqa"))


PLACES: list[Placed] = [
    (strategy, devices)
    for strategy in ("dense", "low_rank", "sharded", "naive")
    for devices in (1, 2, 3, 4, 8)
]
SOURCES: list[Placed] = [("low_rank", 1), ("low_rank", 3), ("naive", 8), ("sharded", 2)]


@pytest.mark.full
@pytest.mark.parametrize("target", PLACES, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_placement_to_any_other(
    variant: str, source: Placed, target: Placed, saved: Any, original: Any, logits: Any
) -> None:
    if target[0] == "sharded" and open_checkpoint(original(variant)).config.hidden_size % target[1]:
        pytest.skip("the residual does not divide")
    check_saved(saved(variant, *source), original(variant))
    check_restored(saved(variant, *source), original(variant), target)
    if source == SOURCES[-1]:  # equal parameters need no second look
        with load(saved(variant, *source), *target) as llm:
            check_logits(llm, logits(variant, target[0] == "dense"))


def test_dense_strategy_saves_the_product(folder: Path, original: Any) -> None:
    path = original("biases")
    with load(path, "dense", 4) as llm:
        saved = llm.save(folder / "product")
    checkpoint, held = open_checkpoint(saved), tensors(path)
    assert not checkpoint.config.low_rank and "low_rank" not in checkpoint.hf_config()
    name = "model.layers.0.self_attn.k_proj"
    product = held[f"{name}.u.weight"] @ held[f"{name}.v.weight"]
    np.testing.assert_allclose(checkpoint.tensor(f"{name}.weight"), product, atol=1e-6)
    assert_same({"b": checkpoint.tensor(f"{name}.bias")}, {"b": held[f"{name}.u.bias"]})


def test_a_dense_model(folder: Path, original: Any) -> None:
    path = original("gqa").parent / "dense"
    with load(path, "dense", 8) as llm:
        saved = llm.save(folder / "dense")
    check_saved(saved, path)
    check_restored(saved, path, ("dense", 3))
    check_restored(saved, path, ("sharded", 4))


def test_what_was_restored_saves_the_same(saved: Any, original: Any, folder: Path) -> None:
    with load(saved("qwen3", "naive", 3), "low_rank", 4) as llm:
        check_saved(llm.save(folder / "again" / "and-again"), original("qwen3"))
    assert [path.name for path in (folder / "again").iterdir()] == ["and-again"]


# Orbax alone


def test_orbax_alone_restores_the_arrays(saved: Any, original: Any) -> None:
    import orbax.checkpoint as ocp

    path, expected = saved("gqa", "sharded", 4), tensors(original("gqa"))
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert_same(checkpointer.restore(path), expected)
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same(checkpointer.restore(path), expected)


def test_orbax_alone_restores_onto_devices(saved: Any, original: Any) -> None:
    import orbax.checkpoint as ocp

    name = "lm_head.weight"
    mesh = choose_placement(3).mesh
    split = NamedSharding(mesh, PartitionSpec("tp"))
    wanted = ocp.ArrayRestoreArgs(sharding=split, global_shape=(162, 48), strict=False)
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(
            saved("gqa", "sharded", 4),
            args=ocp.args.PyTreeRestore(
                item={name: 0}, restore_args={name: wanted}, partial_restore=True
            ),
        )[name]
    assert found.sharding == split
    expected = np.pad(tensors(original("gqa"))[name], ((0, 2), (0, 0)))
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_a_nested_tree_that_orbax_saved(tmp_path: Path, original: Any) -> None:
    import orbax.checkpoint as ocp

    tree: dict[str, Any] = {}
    for name, array in tensors(original("gqa")).items():
        *parents, last = name.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = array
    kinds: list[dict[str, Any]] = [{}, {"use_ocdbt": False}, {"use_zarr3": True}]
    for kind in kinds:
        path = tmp_path / "-".join(["tree", *kind])
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**kind)) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
        shutil.copy(original("gqa") / "config.json", path)
        assert_same(tensors(path), tensors(original("gqa")))
        check_restored(path, original("gqa"), ("sharded", 2))


# What is read

SIZES = dict(
    vocab_size=2048,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    max_position=64,
)
RANKS = dict(q_proj=150, k_proj=70, v_proj=70, o_proj=150, gate_proj=230, up_proj=230)


@pytest.fixture(scope="session")
def large(folder: Path) -> Path:
    """Large enough that the tree's nodes do not decide; ranks that do not divide."""
    config = deinfer_jax.ModelConfig(**SIZES)  # pyright: ignore[reportArgumentType]
    groups = [([name], RANKS.get(name.rpartition(".")[2], 230)) for name in config.linears()]
    config = config.replace(low_rank=low_rank_of(groups))
    arrays = {d.path: jnp.ones(d.shape, d.dtype) for d in declared(config, "low_rank", 1)}
    return save_orbax(folder / "large", config, declared(config, "low_rank", 1), nested(arrays))


def bytes_read() -> int:
    import tensorstore

    name = "/tensorstore/kvstore/file/bytes_read"
    (metric,) = tensorstore.experimental_collect_matching_metrics(name)
    return sum(value["value"] for value in metric["values"])


def declared(config: deinfer_jax.ModelConfig, strategy: str, devices: int) -> list[Declaration]:
    return declarations(
        build(
            config,
            strategy=get_strategy(strategy, devices),
            dtype=jnp.dtype(jnp.float32),
            max_context=32,
        )
    )


def read_by(path: Path, some: list[Declaration], device: int, devices: int) -> int:
    """Bytes that one device's parts cost, in a process that has read nothing yet."""
    checkpoint, placement = open_checkpoint(path), choose_placement(devices)
    before = bytes_read()
    for d in some:
        indices = placement.sharding(d.spec).addressable_devices_indices_map(d.shape)
        index = indices[placement.mesh.devices[device]] or ()
        index += (slice(None),) * (len(d.shape) - len(index))
        bounds = [slice(*i.indices(size)[:2]) for i, size in zip(index, d.shape, strict=True)]
        read_part(checkpoint, d, tuple(bounds))  # pyright: ignore[reportArgumentType]
    return bytes_read() - before


@pytest.mark.parametrize("devices", [1, 4])
def test_sharded_reads_the_model_once_and_each_device_its_part(large: Path, devices: int) -> None:
    model = open_checkpoint(large).stored_bytes()
    some = declared(open_checkpoint(large).config, "sharded", devices)
    read = [read_by(large, some, device, devices) for device in range(devices)]
    assert model <= sum(read) < 1.1 * model
    assert max(read) < 1.15 * model / devices


def test_low_rank_reads_u_of_o_and_down_on_every_device(large: Path) -> None:
    some = declared(open_checkpoint(large).config, "low_rank", 4)
    names = ("o_proj.u.weight", "down_proj.u.weight")
    whole = [d for d in some if d.sources[0].name.endswith(names)]
    split = [d for d in some if d not in whole]
    size = sum(np.prod(d.shape) * 4 for d in whole)
    model = open_checkpoint(large).stored_bytes()
    for device in range(4):
        assert size <= read_by(large, whole, device, 4) < 1.05 * size
        # Factors of q, k, v are cut anywhere, and a chunk on the cut is read on both sides.
        assert read_by(large, split, device, 4) < 1.25 * (model - size) / 4


@pytest.mark.parametrize("strategy", ["sharded", "low_rank"])
def test_load_reads_what_devices_share_once(large: Path, strategy: str) -> None:
    model, before = open_checkpoint(large).stored_bytes(), bytes_read()
    with load(large, strategy, 4):
        assert model <= bytes_read() - before < 1.25 * model


# Types


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_that_the_model_runs_in_is_saved(
    dtype: str, original: Any, tmp_path: Path
) -> None:
    with load(original("gqa"), "sharded", 4, dtype=dtype) as llm:
        path = llm.save(tmp_path / dtype)
    expected = {
        name: array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        for name, array in tensors(original("gqa")).items()
    }
    assert open_checkpoint(path).config.dtype == dtype
    assert_same(tensors(path), expected)
    with load(path, "low_rank", 3, dtype="float32") as llm:  # and widened
        again = llm.save(tmp_path / "wide")
    assert_same(tensors(again), {n: a.astype(np.float32) for n, a in expected.items()})


# As a checkpoint like any other


def test_it_is_inspected(saved: Any, original: Any) -> None:
    found = deinfer_jax.inspect(saved("gqa", "sharded", 4))
    expected = deinfer_jax.inspect(original("gqa"))
    assert found.format == f"Orbax checkpoint, {sum(expected.tensors_by_type.values())} tensors"
    for name in ("config", "parameters", "stored_bytes", "tensors_by_type"):
        assert getattr(found, name) == getattr(expected, name), name


@pytest.mark.full
def test_it_is_decomposed(folder: Path, original: Any, tmp_path: Path) -> None:
    dense = original("gqa").parent / "dense"
    with load(dense, "dense", 2) as llm:
        path = llm.save(tmp_path / "dense")
    options: dict[str, Any] = dict(method="svd", keep=0.5, groups="separate")
    for source in (dense, path):
        deinfer_jax.decompose(source, tmp_path / f"{source.parent.name}-cut", **options)
    cut = sorted(tmp_path.glob("*-cut"))
    assert_same(tensors(cut[0]), tensors(cut[1]))


def test_one_tensor_is_read_without_the_others(saved: Any, original: Any) -> None:
    checkpoint = open_checkpoint(saved("biases", "sharded", 2))
    name = "model.layers.1.mlp.up_proj.u.weight"
    np.testing.assert_array_equal(checkpoint.tensor(name), tensors(original("biases"))[name])
    with pytest.raises(ValueError, match="there are no tensors nothing"):
        checkpoint.tensor("nothing")


def test_tokenizer_and_end_tokens_are_saved(original: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    source = tmp_path / "source"
    shutil.copytree(original("gqa"), source)
    (source / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    words = {f"w{i}": i for i in range(160)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w7")
    made.chat_template = "{{ messages[0].content }}"
    made.save_pretrained(source)
    with load(source, "sharded", 2) as llm:
        path = llm.save(tmp_path / "saved")
    with load(path, "low_rank", 1) as llm:
        assert llm.tokenizer.encode("w3 w9") == [3, 9]
        assert llm.tokenizer.chat_template == made.chat_template
        assert llm.eos_token_ids == (7, 5, 2)
    files = [file.name for file in open_checkpoint(path).files()]
    assert {"config.json", "generation_config.json", "manifest.ocdbt"} <= set(files)
    assert "tokenizer.json" not in files

"""Generation over every kind of cache: the same tokens and logits, whatever is cached."""

from __future__ import annotations

import importlib
import logging
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM, LowRank, ModelConfig, RecompilationError, RopeConfig, Slice
from deinfer_jax.cache.choice import choose_layout
from deinfer_jax.engine import memory
from deinfer_jax.engine.memory import guess_temporaries
from tests.engine.helpers import CONFIG, check_idle, prompts, run

KINDS = ("full", "latent", "full+latent")
BOUND = 2e-6  # of the logits' range, float32: 16 times its rounding, over some 10 products

Pieces = dict[str, tuple[str, int, int]]  # q, k, v, o, gate, up, down: (v's name, offset, rank)
SEPARATE: Pieces = {"q": ("q", 0, 7), "k": ("k", 0, 5), "v": ("v", 0, 3), "o": ("o", 0, 11)}


def low_rank(*layers: Pieces) -> LowRank:
    """The layers of the tiny model; one mapping stands for both."""
    slices = []
    for index, pieces in enumerate(layers if len(layers) == 2 else layers * 2):
        for short, (v, offset, rank) in pieces.items():
            block = "self_attn" if short in "qkvo" else "mlp"
            parent = f"model.layers.{index}.{block}"
            piece = Slice(v=f"{parent}.{v}_proj.v.weight", offset=offset, rank=rank)
            slices.append((f"{parent}.{short}_proj", piece))
    return LowRank(tuple(slices))


def decomposed(*layers: Pieces, **changes: Any) -> ModelConfig:
    return CONFIG.replace(low_rank=low_rank(*layers), **changes)


LLAMA3 = RopeConfig(
    kind="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=24
)
# Two layers each, so that two cases take one compilation.
CONFIGS = {
    "separate, with all that acts on keys": decomposed(
        SEPARATE, qk_norm=True, qkv_bias=True, o_bias=True, windows=(None, 20), rope=LLAMA3
    ),
    "shared q k v, gate up; shared k v": decomposed(
        {
            **{short: ("q_k_v", 0, 9) for short in "qkv"},
            **{short: ("gate_up", 0, 13) for short in ("gate", "up")},
        },
        {"q": ("q", 0, 7), "k": ("k_v", 0, 6), "v": ("k_v", 0, 6)},
        qkv_bias=True,
    ),
    "k alone; v alone": decomposed({"k": ("k", 0, 5)}, {"v": ("v", 0, 3)}, qkv_bias=True),
    "dense; ranks 1 and 67": decomposed({}, {"k": ("k", 0, 1), "v": ("v", 0, 67)}),
    "slices of one factor; values absorbed": decomposed(
        {"k": ("k_v", 0, 5), "v": ("k_v", 5, 9)}, SEPARATE, num_kv_heads=6, qkv_bias=True
    ),
}
ONE = decomposed(SEPARATE).replace(
    num_layers=1, windows=(), low_rank=LowRank(low_rank(SEPARATE).slices[: len(SEPARATE)])
)
SOME = [prompts()[index] for index in (1, 4, 8, 0)]  # of 3, 17, 48 and 1 tokens


@pytest.fixture(scope="module", params=CONFIGS)
def models(request: pytest.FixtureRequest, load_tiny) -> dict[str, LLM]:
    """The same random model in every kind; one bucket of tokens and of pages."""
    return {
        kind: load_tiny(
            config=CONFIGS[request.param],
            kv_cache=kind,
            max_batch=2,
            max_context=80,
            prefill_chunk=16,
            decode_steps=3,
        )
        for kind in KINDS
    }


def test_greedy_tokens_are_the_same(models: dict[str, LLM]) -> None:
    # Unequal lengths over two slots, pages that begin within a dispatch.
    found = {kind: run(llm, SOME, 20) for kind, llm in models.items()}
    assert len({token for ids in found["full"] for token in ids}) > 5
    for kind, llm in models.items():
        assert found[kind] == found["full"], kind
        check_idle(llm)


def test_logits_are_the_same(models: dict[str, LLM]) -> None:
    tokens = [*prompts()[-1][:75]]  # in chunks of 16
    full = models["full"].logits(tokens)
    for kind, llm in models.items():
        difference = np.abs(llm.logits(tokens) - full).max() / np.ptp(full)
        assert difference <= BOUND, kind


def test_a_result_does_not_depend_on_its_batch(models: dict[str, LLM]) -> None:
    for kind in ("latent", "full+latent"):
        together = run(models[kind], SOME, 8)
        assert [run(models[kind], [prompt], 8)[0] for prompt in SOME] == together


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_the_cache_held_before_does_not_matter(models: dict[str, LLM], value: float) -> None:
    for kind in ("latent", "full+latent"):
        llm = models[kind]
        before = run(llm, SOME, 8)
        llm.runner.pools = jax.tree.map(lambda pool: jnp.full_like(pool, value), llm.runner.pools)
        llm.core.scheduler.restart([])  # or pages of the first run would be found again
        assert run(llm, SOME, 8) == before


def test_a_broken_request_does_not_touch_its_neighbour(models: dict[str, LLM]) -> None:
    for kind in ("latent", "full+latent"):
        llm = models[kind]
        (alone,) = run(llm, [SOME[2]], 8)
        word = min(set(range(60, 97)) - set(alone))
        embedding = llm.runner.weights["embedding"]
        whole = embedding["weight"]
        embedding["weight"] = whole.at[word].set(jnp.nan)
        broken, other = deinfer_jax.generate(
            llm, [[5, word], SOME[2]], max_new_tokens=8, ignore_eos=True
        )
        embedding["weight"] = whole
        assert broken.finish_reason == "error" and other.token_ids == alone


def test_the_layouts_are_those_of_the_kind(models: dict[str, LLM]) -> None:
    for kind, llm in models.items():
        assert llm.cache_layout.kind == kind
        assert tuple(pool.layout for pool in llm.runner.pools) == llm.cache_layout.layers
        assert any(pool.latent is not None for pool in llm.runner.pools) == (kind != "full")


def test_sampled_tokens_are_the_same(models: dict[str, LLM]) -> None:
    options = dict(temperature=0.9, top_p=0.9, seed=5)
    found = [run(llm, SOME[:2], 8, **options) for llm in models.values()]
    assert found[0] == found[1] == found[2]


class TestBfloat16:
    """Latents are rounded once, before use: the kinds differ by the rounding of what is rebuilt."""

    @pytest.fixture(scope="class")
    @classmethod
    def halves(cls, load_tiny) -> dict[str, LLM]:
        options = dict(max_batch=2, max_context=80, prefill_chunk=80, dtype="bfloat16")
        return {kind: load_tiny(config=ONE, kv_cache=kind, **options) for kind in KINDS}

    @pytest.mark.parametrize("kind", ["latent", "full+latent"])
    def test_logits_are_near_those_of_the_full_cache(
        self, halves: dict[str, LLM], kind: str
    ) -> None:
        full, other = (halves[one].logits(prompts()[-1][:79]) for one in ("full", kind))
        assert np.abs(full - other).max() / np.ptp(full) < 0.02

    @pytest.mark.parametrize("kind", KINDS)
    def test_decode_agrees_with_prefill(self, halves: dict[str, LLM], kind: str) -> None:
        llm, prompt = halves[kind], prompts()[8]
        (ids,) = run(llm, [prompt], 20)
        logits = llm.logits([*prompt, *ids])[len(prompt) - 1 : -1]
        # The token that decode took is, to prefill, the best or as good as that.
        regret = logits.max(axis=1) - logits[np.arange(len(ids)), list(ids)]
        assert (regret <= 0.02 * np.ptp(logits)).all()


class TestCompactBuffers:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch):
        """Keys of the programs that a model ran."""

        def record(llm: LLM) -> list[Any]:
            keys: list[Any] = []
            original = llm.runner._run

            def spy(key: Any, *arguments: Any) -> Any:
                keys.append(key)
                return original(key, *arguments)

            monkeypatch.setattr(llm.runner, "_run", spy)
            return keys

        return record

    def test_unequal_lengths_take_a_smaller_one(self, load_tiny, asked) -> None:
        llm = load_tiny(config=ONE, kv_cache="latent", max_batch=4, prefill_chunk=128)
        keys = asked(llm)
        equal = [[word] * 90 for word in (7, 8, 9, 10)]  # and nothing to share
        unequal = [[11] * 90, [7], [8], [9]]
        run(llm, equal, 7)  # all of them decode together before the first one ends
        run(llm, unequal, 7)
        sizes = {key[3] for key in keys if key[:3] == ("decode", 4, 8)}
        assert sizes == {24, 16}  # 4 · 6 pages; 6 + 3 pages in a half, 8 in a quarter is too few

    def test_only_pages_of_the_dispatch_are_live(self, load_tiny, asked) -> None:
        # Two pages are reserved for each, of which the first steps use one.
        llm = load_tiny(config=ONE, kv_cache="latent", max_batch=2, max_context=256)
        keys = asked(llm)
        run(llm, [[5], [6]], 30)
        first = next(key for key in keys if key[0] == "decode")
        assert first == ("decode", 2, 8, 8)

    @pytest.mark.parametrize("kind", ["full", "full+latent"])
    def test_nothing_is_prepared_where_nothing_is_rebuilt(
        self, load_tiny, asked, kind: str
    ) -> None:
        llm = load_tiny(config=ONE, kv_cache=kind, prefill_chunk=16)
        keys = asked(llm)
        run(llm, [[5, 6]], 5)
        assert all(len(key) == 3 for key in keys)

    def test_the_warm_up_compiles_them(self, load_tiny) -> None:
        llm = load_tiny(config=ONE, kv_cache="latent", max_batch=2, max_context=144)
        llm.warm_up(progress=False)
        compiled = llm.runner.compilations
        for lengths in ([1], [130, 3, 70], [64, 65, 127, 128, 129], [31, 32, 33]):
            run(llm, [[7] * length for length in lengths], 9)
        assert llm.runner.compilations == compiled == len(set(llm.runner.buckets.programs()))
        with pytest.raises(
            RecompilationError, match="decode with 2 rows and 8 pages and 3 compact pages was not"
        ):
            llm.runner.executable(("decode", 2, 8, 3))


def pool_types(llm: LLM) -> set[str]:
    return {
        "f32[" + ",".join(map(str, leaf.shape)) + "]" for leaf in jax.tree.leaves(llm.runner.pools)
    }


class TestDonation:
    @pytest.fixture(scope="class", params=["latent", "full+latent"])
    @classmethod
    def compiled(cls, request: pytest.FixtureRequest, load_tiny) -> Any:
        llm = load_tiny(config=ONE, kv_cache=request.param, decode_steps=4)
        compact = (24,) if request.param == "latent" else ()
        keys = [("decode", 4, 8, *compact), ("prefill", 32, 8), ("logits", 32, 8)]
        return llm, {key[0]: llm.runner.executable(key) for key in keys}

    @pytest.mark.parametrize("program", ["decode", "prefill", "logits"])
    def test_no_pool_is_copied(self, compiled: Any, program: str) -> None:
        llm, programs = compiled
        text = programs[program].as_text()
        for pool in pool_types(llm):
            assert re.search(rf"{re.escape(pool)}\S* parameter\(", text)
            assert not re.search(rf"= {re.escape(pool)}\S* copy(?:-start)?\(", text)

    @pytest.mark.parametrize("program", ["decode", "prefill", "logits"])
    def test_every_pool_is_aliased(self, compiled: Any, program: str) -> None:
        llm, programs = compiled
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.runner.pools))
        if program != "logits":
            size += sum(leaf.nbytes for leaf in jax.tree.leaves(llm.runner.state))
        assert programs[program].memory_analysis().alias_size_in_bytes == size


class TestMemory:
    @pytest.mark.parametrize("config", ["shared q k v, gate up; shared k v", "k alone; v alone"])
    def test_prefill_takes_no_more_than_was_guessed(self, load_tiny, config: str) -> None:
        wide = CONFIGS[config].replace(max_position=1024)
        llm = load_tiny(
            config=wide, kv_cache="latent", max_context=1024, prefill_chunk=256, max_batch=2
        )
        llm.runner.executable(("prefill", 256, 64))
        found = llm.memory_plan().temporaries
        assert 0 < found <= guess_temporaries(wide, llm.cache_layout, 1024, 256)

    @pytest.mark.parametrize("config", ["shared q k v, gate up; shared k v", "k alone; v alone"])
    def test_decode_takes_no_more_than_was_guessed(self, load_tiny, config: str) -> None:
        wide = CONFIGS[config].replace(max_position=1024)
        llm = load_tiny(config=wide, kv_cache="latent", max_context=1024, max_batch=8)
        layout = llm.cache_layout
        llm.runner.executable(("decode", 8, 64, 512))
        guess = guess_temporaries(wide, layout, 1024, 32) + 512 * layout.rebuilt_bytes_per_page
        assert 0 < llm.memory_plan().temporaries <= guess

    def test_rebuilt_pages_leave_room_for_fewer(self) -> None:
        pages = {}
        for kind in ("full+latent", "latent"):
            layout = choose_layout(ONE, kind, 16, "float32")
            pages[kind] = memory.choose_pages(
                layout,
                ONE,
                weights=0,
                batch=10**6,
                context=128,
                least_context=128,
                cache_bytes=None,
                available=2**30,
                prefill_chunk=32,
            )
            taken = pages[kind] * (layout.bytes_per_page + layout.rebuilt_bytes_per_page)
            assert 0.85 * 2**30 < taken < memory.GPU_FRACTION * 2**30
        assert pages["latent"] * 2 < pages["full+latent"]

    @pytest.mark.parametrize("kind", ["full", "full+latent"])
    def test_nothing_is_rebuilt_outside_latent_keys(self, kind: str) -> None:
        layout = choose_layout(ONE, kind, 16, "float32")
        assert layout.rebuilt_bytes_per_page == 0


class TestLoad:
    def test_random_factors_are_as_declared(self, load_tiny) -> None:
        llm = load_tiny(config=CONFIGS["shared q k v, gate up; shared k v"], kv_cache="latent")
        layer = llm.runner.weights["layers"][0]
        v = np.asarray(layer["attention"]["qkv"]["v"])
        u = np.asarray(layer["attention"]["qkv"]["u"][0])
        assert v.shape == (16, 24)  # rank 9, padded
        assert u.shape == (48 + 16 + 16, 16)
        assert layer["mlp"]["gate_up"]["v"].shape == (16, 24)  # rank 13, padded
        assert v[:9].std() > 0 and u[:, :9].std() > 0
        assert not v[9:].any() and not u[:, 9:].any()

    def test_bytes_per_token(self, load_tiny) -> None:
        llm = load_tiny(config=ONE, kv_cache="latent")
        assert llm.cache_layout.bytes_per_token == 2 * 64 * 4
        used = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.runner.pools))
        assert used == llm.memory_plan().cache
        assert used == llm.runner.num_pages * 16 * llm.cache_layout.bytes_per_token

    def test_auto_says_why(self, load_tiny, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="deinfer_jax"):
            llm = load_tiny(config=ONE)
        assert llm.cache_layout.kind == "full"  # 64 columns are more than 2 heads of 8
        assert "kv_cache: full, the fastest (full: 128 bytes a token" in llm.cache_layout.reason
        assert llm.cache_layout.reason in caplog.text

    def test_auto_takes_what_fits_in_the_asked_bytes(self, load_tiny) -> None:
        config = ONE.replace(num_kv_heads=6, max_position=256)
        # Of 6 heads of 8, full takes 384 bytes a token, latent 512, full+latent 448.
        llm = load_tiny(config=config, cache_bytes=300 * 4 * 128)
        assert "the smallest, since none holds 4 sequences of 128 tokens" in llm.cache_layout.reason
        assert llm.cache_layout.kind == "full"

    def test_the_asked_context_is_what_auto_decides_for(
        self, config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = importlib.import_module("deinfer_jax.engine.load")
        seen: list[Any] = []
        choose = module.choose_layout

        def spy(*arguments: Any, situation: Any = None, **rest: Any) -> Any:
            seen.append(situation)
            return choose(*arguments, situation=situation, **rest)

        monkeypatch.setattr(module, "choose_layout", spy)
        deinfer_jax.load(config, max_batch=3, max_context=77, cache_bytes=10**6).close()
        assert (seen[-1].batch, seen[-1].context, seen[-1].cache_bytes) == (3, 77, 10**6)

    @pytest.mark.parametrize("kind", ["latent", "full+latent"])
    def test_a_dense_model_has_no_latents(self, config, kind: str) -> None:
        with pytest.raises(ValueError, match="kv_cache: expected a model with a decomposed"):
            deinfer_jax.load(config, kv_cache=kind)

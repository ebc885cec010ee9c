"""What a session and a config refuse, with what was expected and what came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_torch.config import read_config
from reference_torch.group import Group
from reference_torch.opening import load
from reference_torch.session import Session, greedy
from tests import tiny
from tests.reference_torch.conftest import Expected, make


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Expected:
    return make("gqa", ("shared", "separate"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(expected: Expected):
    return load(expected.path, Group(), max_context=32)


def session(model, **options: Any) -> Session:
    return Session(model, **{"batch": 2, "context": 32, **options})


class TestSession:
    @pytest.mark.parametrize("name", ["batch", "context", "page_size"])
    def test_sizes(self, model, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
            session(model, **{name: 0})

    def test_graphs_without_a_gpu(self, model) -> None:
        with pytest.raises(ValueError, match="cuda_graphs: expected a CUDA device, got cpu"):
            session(model, cuda_graphs=True)

    def test_cache_kind(self, model) -> None:
        with pytest.raises(ValueError, match="kv_cache: expected one of full.*got 'none'"):
            session(model, kv_cache="none")

    @pytest.mark.parametrize(
        ("row", "tokens", "chunk", "message"),
        [
            (0, [], 5, "at least one token, got none"),
            (0, [5], 0, "chunk: expected at least 1 token, got 0"),
            (2, [5], 5, "row: expected 0 to 1, got 2"),
            (0, [5, 160, -1], 5, r"expected ids from 0 to 159, got \[160, -1\]"),
            (0, [5] * 33, 5, "expected at most 32 tokens, got 33"),
        ],
    )
    def test_prompts(self, model, row: int, tokens: list[int], chunk: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            session(model).prefill(row, tokens, chunk)

    def test_end_of_the_context(self, model) -> None:
        full = session(model)
        for row in range(2):
            full.prefill(row, [5] * 32, 32)
        with pytest.raises(ValueError, match="sequence 0: expected at most 32 tokens, got 33"):
            full.decode(torch.tensor([1, 2]))

    def test_a_prompt_after_decoding(self, model, expected: Expected) -> None:
        prompt, other = expected.prompts[0][:9], expected.prompts[1][:7]
        both = session(model)
        both.prefill(0, prompt, 9)
        both.prefill(1, other[:3], 9)
        both.decode(torch.tensor([5, other[3]]))
        both.prefill(1, other[4:], 9)
        logits = both.decode(torch.tensor([6, 7]))
        alone = session(model)
        last = [
            model.logits(alone.prefill(row, tokens, 32)[-1])
            for row, tokens in enumerate(([*prompt, 5, 6], [*other, 7]))
        ]
        torch.testing.assert_close(logits, torch.stack(last), atol=1e-5, rtol=1e-5)


class TestGreedy:
    def test_one_prompt_a_sequence(self, model) -> None:
        with pytest.raises(ValueError, match="prompts for 2 empty sequences, got 1"):
            greedy(session(model), [[5]], 3, chunk=8)

    def test_no_tokens(self, model) -> None:
        with pytest.raises(ValueError, match="count: expected at least 1 token, got 0"):
            greedy(session(model), [[5], [6]], 0, chunk=8)

    def test_a_used_session(self, model) -> None:
        used = session(model)
        greedy(used, [[5], [6]], 2, chunk=8)
        with pytest.raises(ValueError, match=r"got 2 for lengths \[2, 2\]"):
            greedy(used, [[5], [6]], 2, chunk=8)


class TestConfig:
    def changed(self, expected: Expected, folder: Path, **changes: Any) -> Path:
        fields = json.loads((expected.path / "config.json").read_text())
        for name, value in changes.items():
            if value is None:
                fields.pop(name, None)
            else:
                fields[name] = value
        (folder / "config.json").write_text(json.dumps(fields))
        return folder

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hidden_size": None}, "expected the field 'hidden_size', found none"),
            ({"num_key_value_heads": 4}, "multiple of kv heads, got 6 and 4"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1, got 0.5"),
            ({"deinfer": {"windows": [3]}}, "a window for each of 2 layers, got 1"),
            ({"low_rank": {"version": 2}}, "low_rank.version: expected 1, got 2"),
        ],
        ids=["missing", "heads", "partial", "windows", "version"],
    )
    def test_what_is_refused(
        self, expected: Expected, tmp_path: Path, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            read_config(self.changed(expected, tmp_path, **changes))

    def test_rope_without_a_factor(self, expected: Expected) -> None:
        from reference_torch.rope import Rope

        with pytest.raises(ValueError, match="rope_type 'linear': expected factor, got none"):
            Rope(
                {"rope_type": "linear", "rope_theta": 1e4},
                8,
                96,
                96,
                dtype=torch.float32,
                device=torch.device("cpu"),
            )

    @pytest.mark.parametrize("variant", ["mistral-window", "qwen2", "qwen3"])
    def test_silence_means_what_transformers_assumes(self, variant: str, tmp_path: Path) -> None:
        from transformers import AutoConfig

        tiny.make(variant, tmp_path)
        names = ("num_key_value_heads", "head_dim", "sliding_window", "max_position_embeddings")
        fields = json.loads((tmp_path / "config.json").read_text())
        for name in names:
            fields.pop(name, None)
        fields |= {"num_attention_heads": 32, "hidden_size": 256}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        theirs, ours = AutoConfig.from_pretrained(tmp_path), read_config(tmp_path)
        assert ours.kv_heads == theirs.num_key_value_heads
        head_dim = getattr(theirs, "head_dim", None) or 256 // 32
        assert ours.head_dim == head_dim
        assert ours.max_position == theirs.max_position_embeddings
        if variant == "mistral-window":
            assert ours.windows == (theirs.sliding_window,) * ours.layers


def test_copies_that_say_nothing_are_left_alone(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny.make("tied", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, file)
    load(tmp_path, Group(), max_context=32)


def test_a_broken_shard_is_named_with_its_tensor(expected: Expected, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(expected.path, tmp_path / "m")
    shards = sorted((tmp_path / "m").glob("model-*.safetensors"))
    shards[-1].write_bytes(shards[-1].read_bytes()[:50])
    with pytest.raises(ValueError, match=rf"model\.\S+: cannot be read from .*{shards[-1].name}"):
        load(tmp_path / "m", Group(), max_context=32)

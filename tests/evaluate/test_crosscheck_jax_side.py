"""The JAX side's answer against transformers' forward pass over whole sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deinfer_jax.evaluate.crosscheck import jax_side
from deinfer_jax.evaluate.crosscheck.job import Job, Tokens
from deinfer_jax.evaluate.crosscheck.trace import Trace, scattered
from tests import tiny

torch = pytest.importorskip("torch", reason="the independent implementation is transformers")

# Layers with shared, with partly dense and with separate projections.
GROUPS = tiny.groups("shared-kv", "dense-q-up", "dense-k-o-down")
FORCED, GREEDY = 5, 6
PROMPTS = (35, 50, 21)  # of several chunks, the second one up to another page in decode
MORE = [pytest.param(kind, marks=pytest.mark.full) for kind in ("full", "full+latent")]


def job(path: Path, kv_cache: str) -> Job:
    return Job(
        checkpoint=str(path),
        dtype="float32",
        kv_cache=kv_cache,
        page_size=16,
        prefill_chunk=24,
        max_context=max(PROMPTS) + max(FORCED, GREEDY),
        forced=FORCED,
        greedy=GREEDY,
        device="cpu",
    )


def forward(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Residual stream after the embedding and every layer [L + 1, T, D] and logits [T, W]."""
    last = []
    hook = model.model.layers[-1].register_forward_hook(lambda *args: last.append(args[2]))
    with torch.no_grad():
        out = model(
            torch.from_numpy(tokens.astype(np.int64))[None],
            use_cache=False,
            output_hidden_states=True,
        )
    hook.remove()
    # transformers gives the last one after the final norm.
    stream = [state[0].numpy() for state in out.hidden_states[:-1]]
    output = last[0][0] if isinstance(last[0], tuple) else last[0]
    return np.stack([*stream, output.reshape(stream[0].shape).numpy()]), out.logits[0].numpy()


@pytest.fixture(scope="module", params=["latent", *MORE])
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Tokens, the answer, and the torch model it must agree with."""
    folder = tmp_path_factory.mktemp("model")
    dense = tiny.make("qwen3", folder / "dense", num_hidden_layers=3)
    theirs = tiny.decompose(dense, folder / "dense", folder / "low-rank", GROUPS)
    prompts = [tiny.random_tokens(length, seed=i) for i, length in enumerate(PROMPTS)]
    tokens = Tokens.random(160, forced=FORCED, seed=0, prompts=prompts)
    answer = jax_side.answer(job(folder / "low-rank", request.param), tokens)
    return tokens, answer, theirs, request.param


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape and ours.dtype == np.float32
    assert np.linalg.norm(ours - theirs) <= 2e-6 * np.linalg.norm(theirs)


def test_prefill(asked) -> None:
    tokens, answer, theirs, _ = asked
    for i, prompt in enumerate(tokens.prompts):
        hidden, logits = forward(theirs, prompt)
        for layer, expected in enumerate(hidden):
            assert_close(answer[f"prefill_hidden_{i}"][layer], expected)
        assert_close(answer[f"prefill_logits_{i}"], logits)


def test_decode(asked) -> None:
    tokens, answer, theirs, _ = asked
    for b, prompt in enumerate(tokens.prompts):
        hidden, logits = forward(theirs, np.concatenate([prompt, tokens.forced[:, b]]))
        for layer, expected in enumerate(hidden[:, len(prompt) :]):
            assert_close(answer["decode_hidden"][:, layer, b], expected)
        assert_close(answer["decode_logits"][:, b], logits[len(prompt) :])


def test_greedy(asked) -> None:
    tokens, answer, theirs, _ = asked
    for b, prompt in enumerate(tokens.prompts):
        chosen = answer["greedy_tokens"][:, b]
        logits = forward(theirs, np.concatenate([prompt, chosen[:-1]]))[1][len(prompt) - 1 :]
        np.testing.assert_array_equal(chosen, logits.argmax(axis=1))
        second, best = np.sort(logits, axis=1)[:, -2:].T
        np.testing.assert_allclose(answer["greedy_top"][:, b], best, atol=1e-5)
        np.testing.assert_allclose(answer["greedy_margin"][:, b], best - second, atol=1e-5)


def test_info(asked) -> None:
    _, answer, _, kv_cache = asked
    info = json.loads(str(answer["info"]))
    assert info["kv_cache"] == kv_cache
    assert info["machine"]["platform"] == "cpu" and info["versions"]["jax"]


def test_pages_are_in_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(Exception):
        pass

    def look(self: Trace, llm: Any, tables: np.ndarray) -> None:
        assert len(set(tables.ravel().tolist())) == tables.size
        assert (np.diff(tables, axis=1) != 1).all(), "a run of pages"
        assert (np.diff(tables, axis=1) < 0).any(), "ascending pages"
        assert llm.core.scheduler.share_prefixes is False
        raise Seen

    monkeypatch.setattr(Trace, "__init__", look)
    tiny.make("gqa", tmp_path)
    with pytest.raises(Seen):
        jax_side.answer(
            job(tmp_path, "full"), Tokens.random(160, forced=FORCED, seed=0, prompts=[[3] * 40] * 3)
        )


def test_scattered_pages_are_given_back() -> None:
    from deinfer_jax.cache.allocator import PageAllocator

    allocator = PageAllocator(10)
    with scattered(allocator):
        pages = allocator.allocate(4)
        assert min(np.diff(pages)) > 1
        allocator.release(pages)
    assert allocator.num_free == 10


def test_a_job_that_cannot_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import os

    from deinfer_jax.evaluate.crosscheck.flags import comparable

    for name, value in comparable(os.environ, device="cpu", dtype="float32").items():
        monkeypatch.setenv(name, value)
    missing = job(tmp_path / "nothing", "full")
    missing.write(tmp_path / "job", Tokens.random(160, forced=FORCED, seed=0))
    assert jax_side.main(tmp_path / "job") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"{tmp_path}/nothing: expected a model directory or a GGUF file")
    assert not (tmp_path / "job" / "jax.npz").exists()

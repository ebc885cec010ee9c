"""The real model: SmolLM2-135M-Instruct, in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deinfer_jax

QUESTIONS = (
    "What is the capital of France?",
    "Name three fruits.",
    "Which planet is known as the Red Planet?",
)
TEXT = "The tower is 324 metres tall, about the same height as an 81-storey building, and was"


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[deinfer_jax.LLM]:
    with deinfer_jax.load(smollm2_gguf, max_context=256, prefill_chunk=64) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def theirs(smollm2_gguf: Path) -> Any:
    pytest.importorskip("torch", reason="the independent implementation is transformers on torch")
    from bench.cpu_decode import transformers_model
    from deinfer_jax.checkpoint import open_checkpoint

    return transformers_model(open_checkpoint(smollm2_gguf))


def chats() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": question}] for question in QUESTIONS]


def test_it_knows_the_capital_of_france(llm: deinfer_jax.LLM) -> None:
    (answer,) = deinfer_jax.generate(llm, chats()[0], max_new_tokens=24)
    assert "Paris" in answer.text
    assert answer.finish_reason == "eos"


def test_logits_equal_transformers(llm: deinfer_jax.LLM, theirs: Any) -> None:
    import torch

    tokens = llm.tokenizer(TEXT * 4)["input_ids"]
    assert len(tokens) > 64  # several chunks
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(llm.logits(tokens) - expected).max() <= 1e-4 * np.ptp(expected)


def test_greedy_tokens_equal_transformers(llm: deinfer_jax.LLM, theirs: Any) -> None:
    import torch

    (ours,) = deinfer_jax.generate(llm, TEXT, max_new_tokens=48, ignore_eos=True)
    prompt = torch.tensor([ours.prompt_token_ids])
    with torch.no_grad():
        done = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=48,
            min_new_tokens=48,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    assert list(ours.token_ids) == done[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_answer_does_not_depend_on_its_neighbours(
    llm: deinfer_jax.LLM, temperature: float
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 16, "temperature": temperature, "seed": 7}
    together = deinfer_jax.generate(llm, [*chats()[::-1], TEXT], **options)
    alone = deinfer_jax.generate(llm, chats()[0], **options)
    assert together[2].token_ids == alone[0].token_ids


def test_a_prompt_is_continued_with_its_space(llm: deinfer_jax.LLM) -> None:
    (done,) = deinfer_jax.generate(llm, "The capital of France is", max_new_tokens=4)
    assert done.text.startswith(" ")

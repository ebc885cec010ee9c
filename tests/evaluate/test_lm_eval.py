"""The adapter for the lm-evaluation-harness against the harness's own for transformers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import deinfer_jax
from tests import tiny

pytest.importorskip("lm_eval", reason="an extra: pip install 'deinfer-jax[lm-eval]'")
pytest.importorskip("torch", reason="the independent implementation is transformers on torch")

from lm_eval.api.instance import Instance  # noqa: E402 (is there only now)

from deinfer_jax.evaluate.lm_eval import DeInferLM  # noqa: E402

WORDS = "the cat sat on a mat and ate fish while dogs sang old songs to moon".split()
LONG = " ".join(WORDS[number] for number in np.random.default_rng(0).integers(0, 14, 300))
TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] }}"
    "{% if not loop.last or add_generation_prompt %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% if shy %}{{ ' hm' }}{% endif %}{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
WORD_COUNT = 320  # at most


def byte_level() -> Any:
    """As of GPT-2: bytes, nothing in front; ``<|stop|>`` is special, but in no list of those."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORD_COUNT,
        show_progress=False,
        special_tokens=["<|pad|>", "<|stop|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([LONG], trainer)
    tokenizer.add_special_tokens([AddedToken("<|stop|>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>"
    )


def sentencepiece() -> Any:
    """As of Llama 2: a begin token in front, decoding drops the first blank."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=WORD_COUNT, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]
    )
    tokenizer.train_from_iterator([LONG, "a\nb"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def transformers_adapter(path: Path, **options: Any) -> Any:
    adapter: Any = importlib.import_module("lm_eval.models.huggingface").HFLM
    return adapter(pretrained=str(path), device="cpu", dtype="float32", **options)


class Pair(NamedTuple):
    path: Path
    ours: DeInferLM
    theirs: Any


@pytest.fixture(scope="module", params=[byte_level, sentencepiece], ids=lambda make: make.__name__)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    path = tmp_path_factory.mktemp("model")
    tokenizer = request.param()
    tokenizer.chat_template = TEMPLATE
    tiny.make("gqa", path, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(path)
    ours = DeInferLM(path, prefill_chunk=32, max_batch=3, kv_cache="full")
    theirs = transformers_adapter(path)
    assert ours.max_length == theirs.max_length == 96
    yield Pair(path, ours, theirs)
    ours.llm.close()


def instances(kind: Any, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def both(pair: Pair, kind: str, arguments: list[tuple[Any, ...]]) -> tuple[list[Any], list[Any]]:
    """What the two adapters answer to requests of a kind."""
    ours, theirs = (
        getattr(lm, kind)(instances(kind, arguments), disable_tqdm=True)
        for lm in (pair.ours, pair.theirs)
    )
    return ours, theirs


class TestLoglikelihood:
    @staticmethod
    def compare(pair: Pair, arguments: list[tuple[Any, ...]]) -> list[bool]:
        ours, theirs = both(pair, "loglikelihood", arguments)
        np.testing.assert_allclose([a for a, _ in ours], [a for a, _ in theirs], atol=1e-4)
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
        return [greedy for _, greedy in ours]

    @pytest.mark.parametrize(
        "context",
        ["", "the cat", "the cat ", "the cat \n ", " the", "<s>the cat", "<|end|>the", LONG],
        ids=["none", "words", "blank", "blanks", "first-blank", "begin", "end", "long"],
    )
    def test_continuations(self, pair: Pair, context: str) -> None:
        self.compare(pair, [(context, some) for some in (" sat", "sat on a mat", " ", LONG[:150])])

    def test_an_empty_context_and_a_continuation_that_begins_with_its_token(
        self, pair: Pair
    ) -> None:
        prefix = pair.theirs.tok_decode([pair.theirs.prefix_token_id], skip_special_tokens=False)
        self.compare(pair, [("", f"{prefix}the cat")])

    def test_the_greedy_one(self, pair: Pair) -> None:
        """Of the most likely continuations some are still the same tokens as a text."""
        arguments = []
        for context in (f"{first} cat" for first in WORDS):
            tokens = pair.ours.tok_encode(context)
            best = int(pair.ours.llm.logits(tokens)[-1].argmax())
            whole = pair.ours.tokenizer.decode([*tokens, best], skip_special_tokens=True)
            arguments += [(context, whole[len(context) :] or "a"), (context, " fish")]
        greedy = self.compare(pair, arguments)
        assert any(greedy) and not all(greedy)

    def test_the_longest_continuation(self, pair: Pair) -> None:
        tokens = pair.ours.tok_encode(LONG, add_special_tokens=False)
        text = pair.ours.tokenizer.decode(tokens[:96])
        assert len(pair.ours.tok_encode(text, add_special_tokens=False)) == 96
        self.compare(pair, [("", text)])

    def test_one_that_is_too_long(self, pair: Pair) -> None:
        with pytest.raises(ValueError, match="expected a continuation of 1 to 96 tokens, got"):
            pair.ours.loglikelihood(instances("loglikelihood", [("", LONG)]), disable_tqdm=True)

    def test_what_is_not_a_number(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        broken = np.full(4, np.nan, np.float32), np.zeros(4, bool)
        monkeypatch.setattr(pair.ours.llm, "score_with_greedy", lambda tokens: broken)
        with pytest.raises(ValueError, match="log-probability is nan .*'the', ' cat'"):
            pair.ours.loglikelihood(
                instances("loglikelihood", [("the", " cat")]), disable_tqdm=True
            )


class TestRolling:
    def test_texts(self, pair: Pair) -> None:
        texts = ["the", "the cat sat on a mat", " the", LONG, LONG[:700], "<s>the cat", ""]
        ours, theirs = both(pair, "loglikelihood_rolling", [(text,) for text in texts])
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-4)

    @pytest.mark.parametrize("count", [95, 96, 97, 192, 193])
    def test_lengths_around_a_window(self, pair: Pair, count: int) -> None:
        tokens = pair.ours.tok_encode(LONG, add_special_tokens=False)
        text = pair.ours.tokenizer.decode(tokens[:count])
        ours, theirs = both(pair, "loglikelihood_rolling", [(text,)])
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-4)


class TestGenerate:
    CONTEXTS = ["the cat sat", "on a mat", "<s>old songs", " to the moon", LONG, LONG[100:]]

    @staticmethod
    def compare(pair: Pair, arguments: list[tuple[Any, ...]]) -> list[str]:
        ours, theirs = both(pair, "generate_until", arguments)
        assert ours == theirs
        return ours

    def test_to_the_end(self, pair: Pair) -> None:
        kwargs = {"until": [], "max_gen_toks": 24, "do_sample": False}
        texts = self.compare(pair, [(context, kwargs) for context in self.CONTEXTS])
        assert all(texts)

    def test_to_a_string(self, pair: Pair) -> None:
        """Each from the middle of what the model says, as several tokens and as a part of one."""
        kwargs = {"until": [], "max_gen_toks": 24, "do_sample": False}
        arguments = []
        for context in self.CONTEXTS:
            ((whole,), _) = both(pair, "generate_until", [(context, kwargs)])
            for start, end in ((4, 9), (7, 8), (len(whole) - 1, len(whole))):
                stop = whole[start:end]
                if "\ufffd" not in stop:  # which transformers would find in half a character
                    arguments.append((context, kwargs | {"until": ["\n\n\n", stop]}))
        assert len(arguments) > 6 and all(given["until"][1] for _, given in arguments)
        texts = self.compare(pair, arguments)
        for (_, given), text in zip(arguments, texts, strict=True):
            assert given["until"][1] not in text

    def test_a_string_ends_it_early(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        module = importlib.import_module("deinfer_jax.evaluate.lm_eval")
        kwargs = {"until": [], "max_gen_toks": 24}
        ((whole,), _) = both(pair, "generate_until", [("the cat", kwargs)])
        counts: list[int] = []

        def counted(*arguments: Any, **options: Any) -> Any:
            for increment in deinfer_jax.generate(*arguments, **options):
                counts.append(len(increment.token_ids))
                yield increment

        monkeypatch.setattr(module, "generate", counted)
        self.compare(pair, [("the cat", kwargs | {"until": whole[:3]})])
        assert 0 < sum(counts) < 12

    def test_special_tokens_and_end_tokens(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The model says none, so the test looks at what is passed on."""
        module = importlib.import_module("deinfer_jax.evaluate.lm_eval")
        passed: list[dict[str, Any]] = []
        monkeypatch.setattr(
            module, "generate", lambda *_, **options: passed.append(options) or iter(())
        )
        tokenizer = pair.ours.tokenizer
        name = "<|stop|>" if tokenizer.bos_token is None else "<s>"
        kwargs = {"until": [name, "mat"], "max_gen_toks": 5, "temperature": 0.7, "top_p": 0.9}
        pair.ours.generate_until(instances("generate_until", [("the", kwargs)]), disable_tqdm=True)
        assert passed[0]["stop"] == ["mat"]
        assert passed[0]["stop_token_ids"] == [1, tokenizer.eos_token_id]
        assert passed[0]["temperature"] == 0.7 and passed[0]["top_p"] == 0.9

    def test_several_settings_keep_the_order(self, pair: Pair) -> None:
        settings = [
            {"until": ["sat"], "max_gen_toks": 5},
            {"until": "mat", "max_new_tokens": 9, "temperature": 0.0},
            {"max_tokens": 3, "do_sample": False, "temperature": 0.5},
        ]
        arguments = [(context, one) for context in self.CONTEXTS for one in settings]
        self.compare(pair, arguments)

    def test_samples_are_several(self, pair: Pair) -> None:
        """A task with repeats asks the same again, and wants something else."""
        kwargs = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
        requests = instances("generate_until", [("the cat", kwargs)] * 4)
        texts = pair.ours.generate_until(requests, disable_tqdm=True)
        assert len(set(texts)) == 4
        assert pair.ours.generate_until(requests, disable_tqdm=True) == texts

    def test_an_empty_context(self, pair: Pair) -> None:
        kwargs = {"until": [], "max_gen_toks": 5}
        prefix = pair.ours.tokenizer.decode([pair.ours.prefix_token_id])
        ours = pair.ours.generate_until(
            instances("generate_until", [("", kwargs), (prefix, kwargs)]), disable_tqdm=True
        )
        assert ours[0] == ours[1] != ""

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"num_beams": 4}, r"temperature, top_k, top_p, min_p, got also num_beams"),
            ({"repetition_penalty": 2.0, "stop": 1}, r"got also repetition_penalty, stop"),
            ({"max_gen_toks": 96}, r"max_gen_toks from 1 to 95, .* fits into 96, got 96"),
            ({}, r"max_gen_toks from 1 to 95, .* got 256"),
            ({"max_gen_toks": 0}, r"got 0"),
        ],
        ids=lambda value: None if isinstance(value, str) else "-".join(value) or "default",
    )
    def test_what_it_does_not_take(self, pair: Pair, kwargs: dict[str, Any], message: str) -> None:
        given = {"until": ["a"]} | kwargs
        with pytest.raises(ValueError, match=message):
            pair.ours.generate_until(
                instances("generate_until", [("the", given)]), disable_tqdm=True
            )

    def test_a_request_that_fails(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        module = importlib.import_module("deinfer_jax.evaluate.lm_eval")
        failed = deinfer_jax.Increment(
            index=0,
            sample=0,
            text="",
            token_ids=(),
            logprobs=None,
            finish_reason="error",
            error="logits are not numbers",
        )
        monkeypatch.setattr(module, "generate", lambda *_, **__: iter([failed]))
        requests = instances("generate_until", [("the", {"until": [], "max_gen_toks": 5})])
        with pytest.raises(RuntimeError, match="request 0: logits are not numbers"):
            pair.ours.generate_until(requests, disable_tqdm=True)


class TestChat:
    MESSAGES = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "who"},
        {"role": "assistant", "content": "a cat"},
    ]

    @pytest.mark.parametrize("goes_on", [False, True])
    def test_template(self, pair: Pair, goes_on: bool) -> None:
        messages = self.MESSAGES if goes_on else self.MESSAGES[:2]
        ours, theirs = (
            lm.apply_chat_template(messages, add_generation_prompt=not goes_on)
            for lm in (pair.ours, pair.theirs)
        )
        assert ours == theirs != ""
        assert pair.ours.chat_template(True) == pair.theirs.chat_template(True) == TEMPLATE
        assert pair.ours.tokenizer_name == pair.theirs.tokenizer_name

    def test_a_template_that_refuses_system_messages(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for lm in (pair.ours, pair.theirs):
            monkeypatch.setattr(lm.tokenizer, "chat_template", NO_SYSTEM + TEMPLATE)
        ours, theirs = (lm.apply_chat_template(self.MESSAGES[:2]) for lm in pair[1:])
        assert ours == theirs == "[user] who\n[assistant]"

    def test_arguments_of_the_template(self, pair: Pair) -> None:
        shy = DeInferLM(pair.ours.llm, chat_template_args={"shy": True}, enable_thinking=False)
        assert shy.apply_chat_template(self.MESSAGES[1:2]) == "[user] who\n[assistant] hm"


class TestConstruction:
    def test_from_an_argument_string(self, pair: Pair) -> None:
        from lm_eval.api.registry import get_model

        made: Any = get_model("deinfer").create_from_arg_string(
            f"path={pair.path},kv_cache=full,max_batch=2,max_length=40",
            {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"},
        )
        with made.llm:
            assert isinstance(made, DeInferLM) and made.llm.max_batch == 2
            assert made.max_length == 40

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kv_cache": "full"}, r"no options to load with an LLM, got \['kv_cache'\]"),
            ({"max_length": 97}, "max_length: expected 1 to max_context = 96, got 97"),
        ],
        ids=lambda value: None if isinstance(value, str) else next(iter(value)),
    )
    def test_refusals(self, pair: Pair, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            DeInferLM(pair.ours.llm, **options)

    def test_a_model_without_a_tokenizer(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pair.ours.llm, "tokenizer", None)
        with pytest.raises(ValueError, match="expected a model with a tokenizer"):
            DeInferLM(pair.ours.llm)

    def test_a_prefix_of_ones_own(self, pair: Pair) -> None:
        theirs = transformers_adapter(pair.path, prefix_token_id=7)
        own = Pair(pair.path, DeInferLM(pair.ours.llm, prefix_token_id=7), theirs)
        TestLoglikelihood.compare(own, [("", "the cat"), ("the", " cat")])

    def test_results_go_to_the_cache(self, pair: Pair) -> None:
        class Hook:
            def __init__(self) -> None:
                self.seen: list[tuple[Any, ...]] = []

            def add_partial(self, *what: Any) -> None:
                self.seen.append(what)

        cached: Any = DeInferLM(pair.ours.llm)
        hook = Hook()
        cached.set_cache_hook(hook)
        kwargs = {"until": ["q"], "max_new_tokens": 3}
        scored = cached.loglikelihood(instances("loglikelihood", [("a", " b")]), disable_tqdm=True)
        rolled = cached.loglikelihood_rolling(
            instances("loglikelihood_rolling", [(LONG,)]), disable_tqdm=True
        )
        said = cached.generate_until(
            instances("generate_until", [("a", kwargs)]), disable_tqdm=True
        )
        assert hook.seen == [
            ("loglikelihood", ("a", " b"), scored[0]),
            ("loglikelihood_rolling", (LONG,), rolled[0]),
            ("generate_until", ("a", {"until": ["q"], "max_new_tokens": 3}), said[0]),
        ]


def test_without_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deinfer_jax.evaluate.lm_eval")
    monkeypatch.setitem(sys.modules, "lm_eval.api.instance", None)
    with pytest.raises(ImportError, match=r"pip install 'deinfer-jax\[lm-eval\]'"):
        importlib.import_module("deinfer_jax.evaluate.lm_eval")


def test_whole_tasks(pair: Pair) -> None:
    """The harness runs tasks of all kinds on data made here, few-shot examples included."""
    datasets = pytest.importorskip("datasets")
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    rng = np.random.default_rng(1)

    def rows(**_: Any) -> Any:
        made = [
            {
                "question": " ".join(rng.choice(WORDS, 6)),
                "choices": [" ".join(rng.choice(WORDS, count)) for count in (1, 2, 3)],
                "answer": int(rng.integers(3)),
            }
            for _ in range(8)
        ]
        return {"test": datasets.Dataset.from_list(made)}

    data = rows()
    shared = {"custom_dataset": lambda **_: data, "dataset_path": "made", "test_split": "test"}
    tasks: list[Any] = [
        {
            "task": "choose",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}:",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "fewshot_split": "test",
            "num_fewshot": 2,
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        {
            "task": "read",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{question}} {{choices[2]}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        {
            "task": "say",
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["t"], "max_gen_toks": 8},
            "metric_list": [{"metric": "exact_match"}],
        },
    ]
    results = []
    for lm in (pair.ours, pair.theirs):
        found: Any = simple_evaluate(
            lm,
            tasks=[shared | task for task in tasks],
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
        )
        results.append(found)
    ours, theirs = results
    assert set(ours["results"]) == {"choose", "read", "say"}
    for task, metrics in ours["results"].items():
        for name, value in metrics.items():
            expected = theirs["results"][task][name]
            near = isinstance(value, float)
            assert value == (pytest.approx(expected, rel=1e-5) if near else expected)
    for task, samples in ours["samples"].items():
        for mine, other in zip(samples, theirs["samples"][task], strict=True):
            assert mine["arguments"] == other["arguments"]
            if task == "say":
                assert mine["resps"] == other["resps"]

"""What ``generate`` takes, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import deinfer_jax
from deinfer_jax import LLM
from tests.engine.helpers import (
    SAMPLED,
    check_idle,
    prompts,
    run,
    tokens,
)


class TestPromptKinds:
    @pytest.mark.parametrize(
        "one",
        [
            [5, 6, 7],
            (5, 6, 7),
            np.array([5, 6, 7]),
            np.array([5, 6, 7], np.uint8),
            [np.int32(5), np.int64(6), 7],
            [[5, 6, 7]],
            [(5, 6, 7)],
            [np.array([5, 6, 7])],
            np.array([[5, 6, 7]]),
        ],
        ids=[
            "list",
            "tuple",
            "array",
            "uint8",
            "numpy ints",
            "list of a list",
            "list of a tuple",
            "list of an array",
            "2-d array",
        ],
    )
    def test_one_prompt_of_ids(self, llm: LLM, one: Any) -> None:
        (done,) = deinfer_jax.generate(llm, one, max_new_tokens=1)
        assert done.prompt_token_ids == (5, 6, 7)

    @pytest.mark.parametrize(
        "several",
        [
            [[5, 6], [7, 8]],
            [np.array([5, 6]), np.array([7, 8])],
            np.array([[5, 6], [7, 8]]),
            [np.array([5, 6]), [7, 8]],
        ],
        ids=["lists", "arrays", "2-d array", "mixed"],
    )
    def test_several_prompts_of_ids(self, llm: LLM, several: Any) -> None:
        done = deinfer_jax.generate(llm, several, max_new_tokens=1)
        assert [one.prompt_token_ids for one in done] == [(5, 6), (7, 8)]

    def test_no_prompts(self, llm: LLM) -> None:
        assert deinfer_jax.generate(llm, [], max_new_tokens=1) == []

    def test_prompts_of_different_lengths_as_arrays(self, llm: LLM) -> None:
        several = [np.array([5, 6]), np.array([7, 8, 9])]
        done = deinfer_jax.generate(llm, several, max_new_tokens=1)
        assert [one.prompt_token_ids for one in done] == [(5, 6), (7, 8, 9)]

    def test_completion_ids_are_python_ints(self, llm: LLM) -> None:
        (done,) = deinfer_jax.generate(llm, np.array([5, 6, 7]), max_new_tokens=2)
        assert {type(i) for i in (*done.prompt_token_ids, *done.token_ids)} == {int}


# what is wrong: (prompts, options, message)
BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty prompt": ([[5], []], {}, "prompt 1: expected at least one token"),
    "several empty prompts": ([[], [5], []], {}, "prompt 0.*prompt 2"),
    "word below": ([[5, -1]], {}, r"prompt 0.*from 0 to 96, got \[-1\]"),
    "word above": ([[5], [97, 5, 98]], {}, r"prompt 1.*got \[97, 98\]"),
    "text without tokenizer": ("hello", {}, "expected token ids.*no tokenizer"),
    "chat without tokenizer": ([{"role": "user", "content": "x"}], {}, "no tokenizer"),
    "too long": (
        [[5], [5] * 120, [5], [5] * 130],
        {"max_new_tokens": 9},
        r"^prompt 1: 120 \+ 9 new tokens, expected at most max_context = 128 together; "
        r"prompt 3: 130 \+ 9 new tokens, expected at most max_context = 128 together$",
    ),
    "too long by one": ([[5] * 120], {"max_new_tokens": 9}, r"^prompt 0: 120 \+ 9 new tokens"),
    "an empty and a long one": (
        [[], [5] * 130],
        {},
        r"^prompt 0: expected at least one token.*; prompt 1: 130 \+ 3 new tokens",
    ),
    "everything at once": (
        [[], [5] * 126, [97], [5], "text", [5.5]],
        {},
        r"^prompt 0: expected at least one token[^;]*; prompt 1: 126 \+ 3 new tokens, expected at "
        r"most max_context = 128 together; prompt 2: [^;]*0 to 96, got \[97\]; prompt 4: [^;]*; "
        r"prompt 5: [^;]*$",
    ),
    "a message by itself": (
        {"role": "user", "content": "x"},
        {},
        r"^prompts: expected a string, a chat \(a list of messages\), .*, got dict$",
    ),
    "bytes": (b"w1", {}, "^prompts: expected a string, .*, got bytes$"),
    "bytes in a list": ([[5], b"w1"], {}, "^prompt 1: expected a string, .*, got bytes$"),
    "bytearray": (bytearray(b"w1"), {}, "^prompts: .*, got bytearray$"),
    "a set": ({5, 6}, {}, "^prompts: .*, got set$"),
    "a set in a list": ([{5, 6}, [5]], {}, "^prompt 0: .*, got set$"),
    "a generator": ((i for i in [5]), {}, "^prompts: .*, got generator$"),
    "a generator in a list": ([[5], (i for i in [5])], {}, "^prompt 1: .*, got generator$"),
    "a range": (range(5), {}, "^prompts: .*, got range$"),
    "a number": (5, {}, "^prompts: .*, got int$"),
    "an array without axes": (np.array(5), {}, "^prompts: .*, got ndarray$"),
    "an array without axes in a list": ([np.array(5)], {}, "^prompt 0: .*, got ndarray$"),
    "None": (None, {}, "^prompts: .*, got NoneType$"),
    "None in a list": ([[5], None], {}, "^prompt 1: .*, got NoneType$"),
    "an object": ([object()], {}, "^prompt 0: .*, got object$"),
    "empty string": ("", {}, "^prompt 0: expected text, got an empty string$"),
    "empty string in a list": ([[5], ""], {}, "^prompt 1: expected text, got an empty string$"),
    "fractions": (np.array([[5.0, 6.0]]), {}, "^prompt 0: .*or token ids, got a list with .*5.0"),
    "truth values": ([[5], [True, False]], {}, "^prompt 1: .*or token ids, got a list with True$"),
    "None among ids": ([[5, None]], {}, "^prompt 0: .*or token ids, got a list with 5$"),
    "lists in a list in a list": (
        [[[5]]],
        {},
        r"^prompt 0: .*or token ids, got a list with \[5\]$",
    ),
    "a message without content": (
        [[{"role": "user"}]],
        {},
        r"^prompt 0: expected .*'role' and 'content', .*got a list with \{'role': 'user'\}$",
    ),
    "a chat without content": (
        [[5], [{"role": "user", "content": None}]],
        {},
        "^prompt 1: expected 'role' and 'content' to be strings, got .*'content': None",
    ),
    "a word beyond 64 bits": ([[5, 10**30]], {}, f"^prompt 0: .*from 0 to 96, got .{10**30}.$"),
    "temperature": (
        [[5]],
        {"temperature": -0.1},
        "^temperature: expected a float32 number >= 0, got -0.1$",
    ),
    "temperature nan": ([[5]], {"temperature": float("nan")}, "temperature: .*>= 0, got nan"),
    "temperature inf": ([[5]], {"temperature": float("inf")}, "temperature: .*>= 0, got inf"),
    "temperature beyond float32": (
        [[5]],
        {"temperature": 1e39},
        r"temperature: expected a float32 number >= 0, got 1e\+39",
    ),
    "temperature text": ([[5]], {"temperature": "1"}, "^temperature: .*got '1'$"),
    "temperature None": ([[5]], {"temperature": None}, "^temperature: .*got None$"),
    "temperature bool": ([[5]], {"temperature": True}, "^temperature: .*got True$"),
    "temperature array": ([[5]], {"temperature": np.array(0.5)}, "^temperature: .*got array"),
    "temperature complex": ([[5]], {"temperature": np.complex64(1)}, "^temperature: .*got "),
    "temperature beyond float64": ([[5]], {"temperature": 10**400}, "^temperature: .*got 1000"),
    "top_p text": ([[5]], {"top_p": "0.9"}, "^top_p: .*got '0.9'$"),
    "top_p None": ([[5]], {"top_p": None}, "^top_p: .*got None$"),
    "top_p list": ([[5]], {"top_p": [0.9]}, r"^top_p: .*got \[0.9\]$"),
    "top_p bool": ([[5]], {"top_p": True}, "^top_p: .*got True$"),
    "top_k text": ([[5]], {"top_k": "3"}, "^top_k: .*got '3'$"),
    "top_k None": ([[5]], {"top_k": None}, "^top_k: .*got None$"),
    "min_p text": ([[5]], {"min_p": "0"}, "^min_p: .*got '0'$"),
    "min_p None": ([[5]], {"min_p": None}, "^min_p: .*got None$"),
    "min_p nan": ([[5]], {"min_p": float("nan")}, "^min_p: .*got nan$"),
    "new tokens text": ([[5]], {"max_new_tokens": "3"}, "^max_new_tokens: .*got '3'$"),
    "new tokens None": ([[5]], {"max_new_tokens": None}, "^max_new_tokens: .*got None$"),
    "new tokens beyond 64 bits": ([[5]], {"max_new_tokens": 10**30}, r"^prompt 0: 1 \+ 1000"),
    "seed text": ([[5]], {"seed": "7"}, "^seed: .*got '7' for prompt 0$"),
    "seed None among others": ([[5]], {"seed": [None]}, "^seed: .*got None for prompt 0$"),
    "seed fraction": ([[5]], {"seed": 1.0}, "^seed: .*got 1.0 for prompt 0$"),
    "seed set": ([[5]], {"seed": {1}}, r"^seed: .*got \{1\} for prompt 0$"),
    "seed array without axes": (
        [[5]],
        {"seed": np.array(5)},
        r"^seed: .*got array\(5\) for prompt 0$",
    ),
    "top_p zero": ([[5]], {"top_p": 0.0}, r"top_p: expected a number in \(0, 1\], got 0.0"),
    "top_p above one": ([[5]], {"top_p": 1.01}, "top_p.*got 1.01"),
    "top_p nan": ([[5]], {"top_p": float("nan")}, "top_p.*got nan"),
    "top_k": ([[5]], {"top_k": -1}, "top_k: expected an integer >= 0, got -1"),
    "top_k fraction": ([[5]], {"top_k": 2.5}, "top_k: expected an integer >= 0, got 2.5"),
    "top_k bool": ([[5]], {"top_k": True}, "top_k: expected an integer >= 0, got True"),
    "min_p below": ([[5]], {"min_p": -0.1}, r"min_p: .*\[0, 1\], got -0.1"),
    "min_p above": ([[5]], {"min_p": 1.5}, r"min_p: .*\[0, 1\], got 1.5"),
    "no new tokens": ([[5]], {"max_new_tokens": 0}, "max_new_tokens: .*positive.*got 0"),
    "new tokens fraction": ([[5]], {"max_new_tokens": 2.0}, "max_new_tokens: .*positive.*got 2.0"),
    "new tokens bool": ([[5]], {"max_new_tokens": True}, "max_new_tokens: .*positive.*got True"),
    "seed below": ([[5]], {"seed": -1}, "^seed: expected integers .*got -1 for prompt 0$"),
    "seed above": ([[5]], {"seed": 2**64}, "^seed: .*got 18446744073709551616 for prompt 0$"),
    "too few seeds": ([[5], [6], [7]], {"seed": [1, 2]}, r"one a prompt \(3\), got 2"),
    "one bad seed": ([[5], [6]], {"seed": [1, -2]}, "^seed: .*got -2 for prompt 1$"),
    "several bad seeds": (
        [[5], [6], [7], [8]],
        {"seed": [-1, 2, 2.5, True]},
        "^seed: .*got -1 for prompt 0, 2.5 for prompt 2, True for prompt 3$",
    ),
    "stop token below": (
        [[5]],
        {"stop_token_ids": [-1]},
        r"stop_token_ids: expected ids from 0 to 96, got \[-1\]",
    ),
    "stop token above": ([[5]], {"stop_token_ids": [3, 97]}, r"stop_token_ids.*96, got \[97\]"),
    "stop tokens number": ([[5]], {"stop_token_ids": 5}, "^stop_token_ids: .*ids, got 5$"),
    "stop tokens text": ([[5]], {"stop_token_ids": "x"}, "^stop_token_ids: .*ids, got 'x'$"),
    "stop tokens bytes": ([[5]], {"stop_token_ids": b"x"}, "^stop_token_ids: .*ids, got b'x'$"),
    "stop tokens mapping": (
        [[5]],
        {"stop_token_ids": {5: 6}},
        "^stop_token_ids: .*ids, got {5: 6}$",
    ),
    "stop tokens array without axes": (
        [[5]],
        {"stop_token_ids": np.array(5)},
        r"^stop_token_ids: .*ids, got array\(5\)$",
    ),
    "stop token fraction": ([[5]], {"stop_token_ids": [3, 4.0]}, r"stop_token_ids.*got \[4.0\]"),
    "stop token bool": ([[5]], {"stop_token_ids": [True]}, r"stop_token_ids.*got \[True\]"),
    "stop token text": ([[5]], {"stop_token_ids": ["x"]}, r"stop_token_ids.*got \['x'\]"),
}


def refuse(llm: LLM, what: Any, options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 3} | options
    deinfer_jax.generate(llm, what, **arguments)


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    @pytest.mark.parametrize("name", BAD)
    def test_is_refused(self, llm: LLM, name: str) -> None:
        what, options, message = BAD[name]
        with pytest.raises(ValueError, match=message):
            refuse(llm, what, options)

    def test_nothing_runs_before_everything_is_checked(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dispatched = []
        monkeypatch.setattr(llm.runner, "_run", lambda *arguments: dispatched.append(arguments))
        for what, options, _ in BAD.values():
            with pytest.raises(ValueError):
                refuse(llm, what, options)
        assert dispatched == []

    @pytest.mark.parametrize("option", ["max_new_tokens", "temperature", "top_k", "top_p", "min_p"])
    def test_parameters_are_checked_before_a_path_is_loaded(self, option: str) -> None:
        options: dict[str, Any] = {option: -1}
        with pytest.raises(ValueError, match=f"^{option}: .*got -1$"):
            deinfer_jax.generate("no-such-model", [5], **options)

    def test_a_path_that_does_not_exist(self) -> None:
        with pytest.raises(FileNotFoundError, match="no-such-model"):
            deinfer_jax.generate("no-such-model", [5], top_k=3)

    @pytest.mark.parametrize(
        "kind", [list, tuple, set, frozenset, np.array], ids=lambda k: k.__name__
    )
    def test_kinds_of_stop_tokens(self, llm: LLM, kind: Any) -> None:
        plain = run(llm, [5, 6])
        word = plain[0][2]
        found = run(llm, [5, 6], stop_token_ids=kind([word, 96]))
        assert found == [plain[0][: plain[0].index(word) + 1]]

    def test_none_means_nothing_to_stop_at(self, llm: LLM) -> None:
        assert run(llm, [5, 6], stop=None, stop_token_ids=None) == run(llm, [5, 6])

    def test_seed_none_is_another_one_in_every_call_and_for_every_prompt(self, llm: LLM) -> None:
        found = [run(llm, [[5, 6]] * 2, temperature=1.0, seed=None) for _ in range(2)]
        assert len({ids for call in found for ids in call}) == 4

    def test_a_range_of_seeds(self, llm: LLM) -> None:
        pair = [[5, 6], [5, 7]]
        found = run(llm, pair, temperature=1.0, seed=range(3, 5))
        assert found == run(llm, pair, temperature=1.0, seed=[3, 4])

    @pytest.mark.parametrize("top_p", [1e-46, 1e-300, 5e-324])
    def test_the_tiniest_top_p_keeps_the_best_word(self, llm: LLM, top_p: float) -> None:
        (done,) = deinfer_jax.generate(
            llm, [5, 6], max_new_tokens=12, ignore_eos=True, temperature=3.0, top_p=top_p
        )
        assert (done.error, [done.token_ids]) == (None, run(llm, [5, 6]))

    def test_unknown_argument(self, llm: LLM) -> None:
        with pytest.raises(TypeError, match="top_kk"):
            deinfer_jax.generate(llm, [5], top_kk=3)  # pyright: ignore[reportCallIssue]

    def test_integers_of_numpy(self, llm: LLM, load_tiny) -> None:
        options: dict[str, Any] = dict(
            max_new_tokens=np.int64(4),
            top_k=np.int32(5),
            temperature=np.float32(0.5),
            seed=np.array([2**64 - 1, 7], np.uint64),
            stop_token_ids=np.array([96], np.uint8),
            ignore_eos=True,
        )
        plain: dict[str, Any] = dict(
            max_new_tokens=4,
            top_k=5,
            temperature=0.5,
            seed=[2**64 - 1, 7],
            stop_token_ids=[96],
            ignore_eos=True,
        )
        pair = [[5, 6], [7, 8]]
        expected = deinfer_jax.generate(llm, pair, **plain)
        # A model of its own, since annotations are checked again afterwards.
        assert tokens(deinfer_jax.generate(load_tiny(), pair, **options)) == tokens(expected)

    def test_the_tiniest_temperature_is_greedy(self, llm: LLM) -> None:
        assert run(llm, [5, 6], temperature=1e-30) == run(llm, [5, 6])

    def test_the_largest_temperature(self, llm: LLM) -> None:
        largest = float(np.finfo(np.float32).max)
        (done,) = deinfer_jax.generate(
            llm, [5, 6], max_new_tokens=5, temperature=largest, ignore_eos=True
        )
        assert done.error is None and len(done.token_ids) == 5

    def test_top_k_above_the_vocabulary_keeps_all(self, llm: LLM) -> None:
        assert run(llm, [5, 6], top_k=2**40, **SAMPLED) == run(llm, [5, 6], **SAMPLED)

    def test_the_model_works_afterwards(self, llm: LLM) -> None:
        before = run(llm, [5, 6])
        for what, options, _ in BAD.values():
            with pytest.raises(ValueError):
                refuse(llm, what, options)
        assert run(llm, [5, 6]) == before

    def test_an_interrupted_run_leaves_the_model_usable(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = run(llm, prompts())
        take, taken = llm.core._take, []

        def interrupt(*arguments: Any) -> None:
            taken.append(arguments)
            if len(taken) == 7:
                raise KeyboardInterrupt
            take(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(llm.core, "_take", interrupt)
            with pytest.raises(KeyboardInterrupt):
                run(llm, prompts())
        check_idle(llm)
        assert run(llm, prompts()) == before

    def test_a_cache_too_small_for_one_request(self, load_tiny) -> None:
        small = load_tiny(cache_bytes=3 * 4 * 16 * 2 * 2 * 2 * 8)
        with pytest.raises(
            ValueError, match=r"holds 48 tokens.*prompt 1 \(45 \+ 5 tokens\).*cache_bytes = 16384"
        ):
            deinfer_jax.generate(small, [[5], [5] * 45], max_new_tokens=5)
        check_idle(small)

    def test_the_cache_it_names_would_do(self, load_tiny) -> None:
        enough = load_tiny(cache_bytes=16384)
        assert len(run(enough, [5] * 45, new=5)[0]) == 5

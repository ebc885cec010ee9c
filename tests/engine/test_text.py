"""Text and chats, by way of a tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

import deinfer_jax
from deinfer_jax import LLM
from deinfer_jax.engine.request import Request
from tests.engine.helpers import (
    prompts,
)


class TestText:
    """The text is what the continuation adds to the decoded prompt."""

    @pytest.fixture
    def speaking(self, llm: LLM, sentencepiece: Any, monkeypatch: pytest.MonkeyPatch) -> LLM:
        monkeypatch.setattr(llm, "tokenizer", sentencepiece)
        return llm

    def say(
        self,
        llm: LLM,
        monkeypatch: pytest.MonkeyPatch,
        prompt: list[int],
        generated: list[int],
        reason: Any = "length",
    ) -> str:
        """Text of a continuation that the model is made to give."""

        def submit(requests: list[Request]) -> None:
            for request in requests:
                request.times.extend(range(len(generated) + 1))
                request.generated.extend(generated)
                request.finish_reason = reason

        with monkeypatch.context() as patch:
            patch.setattr(llm.core, "submit", submit)
            (done,) = deinfer_jax.generate(llm, prompt, max_new_tokens=20)
        assert done.token_ids == tuple(generated)
        return done.text

    def test_the_tokenizer_drops_a_leading_blank(self, sentencepiece: Any) -> None:
        # Otherwise the tests below would show nothing.
        assert sentencepiece.decode([8, 9]) == "w1 w2"
        assert sentencepiece("w1 w2")["input_ids"] == [8, 9]

    @pytest.mark.parametrize(
        ("prompt", "generated", "reason", "text"),
        [
            ([1, 8], [9, 10], "length", " w2 w3"),
            ([1, 8], [5, 9], "length", "ly w2"),
            ([1, 8], [9, 2], "eos", " w2"),
            ([1, 8], [9, 10], "stop", " w2"),
            ([1, 8], [2], "eos", ""),
            ([1, 8], [9, 2, 10], "length", " w2 w3"),
            ([1], [9, 10], "length", "w2 w3"),
            ([1, 8], [3, 4], "length", "ü"),
            ([1, 8], [6, 9], "length", ", w2"),
        ],
        ids=[
            "blank",
            "no blank",
            "end token",
            "stop token",
            "end token alone",
            "special token inside",
            "at the beginning",
            "bytes",
            "comma",
        ],
    )
    def test_text(
        self,
        speaking: LLM,
        monkeypatch: pytest.MonkeyPatch,
        prompt: list[int],
        generated: list[int],
        reason: str,
        text: str,
    ) -> None:
        assert self.say(speaking, monkeypatch, prompt, generated, reason) == text

    def test_an_error_without_tokens(self, speaking: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.say(speaking, monkeypatch, [1, 8], [], "error") == ""

    def test_a_character_across_the_seam(
        self, speaking: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Neither part has the character; the prompt may not come again.
        text = self.say(speaking, monkeypatch, [1, 8, 3], [4, 9])
        assert text.endswith(" w2") and "w1" not in text

    def test_prompt_and_text_are_the_whole(self, speaking: LLM, sentencepiece: Any) -> None:
        for done in deinfer_jax.generate(speaking, prompts(), max_new_tokens=12, ignore_eos=True):
            prompt = list(done.prompt_token_ids)
            both = [
                sentencepiece.decode(ids, skip_special_tokens=True)
                for ids in (prompt, [*prompt, *done.token_ids])
            ]
            if both[1].startswith(both[0]):
                assert both[0] + done.text == both[1]
            else:  # a byte at the seam
                assert prompt[-1] in (3, 4)

    def test_a_prompt_of_text(self, speaking: LLM, sentencepiece: Any) -> None:
        (done,) = deinfer_jax.generate(speaking, "w1 w2", max_new_tokens=6, ignore_eos=True)
        assert done.prompt_token_ids == (8, 9)
        assert "w1 w2" + done.text == sentencepiece.decode(
            [8, 9, *done.token_ids], skip_special_tokens=True
        )

    def test_a_message_by_itself(self, speaking: LLM, unchecked) -> None:
        with pytest.raises(ValueError, match="^prompts: expected .*a list of messages.*got dict$"):
            deinfer_jax.generate(speaking, {"role": "user", "content": "w1"})  # pyright: ignore[reportArgumentType]


TEMPLATE = """{% for m in messages %}{% if m.role == "system" %}
{{ raise_exception("no system messages") }}{% endif %}{{ m.content }} {% endfor %}w9"""


class TestRefusals:
    """Text and chats that give no tokens; the message names the prompt."""

    @pytest.fixture
    def speaking(
        self, llm: LLM, sentencepiece: Any, monkeypatch: pytest.MonkeyPatch, unchecked
    ) -> LLM:
        monkeypatch.setattr(llm, "tokenizer", sentencepiece)
        monkeypatch.setattr(sentencepiece, "chat_template", TEMPLATE)
        return llm

    def refuse(self, llm: LLM, bad: Any, message: str) -> None:
        def run(requests: object) -> None:
            raise AssertionError("something has run")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.core, "advance", run)
            with pytest.raises(ValueError, match=f"^prompt 1: {message}$"):
                deinfer_jax.generate(llm, ["w1", bad, [5, 6]], max_new_tokens=3)
            with pytest.raises(
                ValueError, match=f"^prompt 0: {message}; prompt 2: .*empty string$"
            ):
                deinfer_jax.generate(llm, [bad, "w1", ""], max_new_tokens=3)

    def test_a_chat(self, speaking: LLM) -> None:
        # Otherwise the tests below would show nothing.
        chat = [{"role": "user", "content": "w1 w2"}]
        (done,) = deinfer_jax.generate(speaking, chat, max_new_tokens=1)
        assert done.prompt_token_ids == (8, 9, 16)

    @pytest.mark.parametrize("adds", [False, True], ids=["no bos", "bos"])
    def test_an_empty_string(self, speaking: LLM, sentencepiece: Any, adds: bool) -> None:
        from tokenizers import processors

        tokenizer = sentencepiece.backend_tokenizer
        if adds:
            before = tokenizer.post_processor
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
            )
        try:
            if adds:
                assert sentencepiece("")["input_ids"] == [1]
            self.refuse(speaking, "", "expected text, got an empty string")
        finally:
            if adds:
                tokenizer.post_processor = before

    @pytest.mark.parametrize("text", ["w1 \ud800", "\udfff", "w1 \udc80 w2"], ids=ascii)
    def test_a_lone_surrogate(self, speaking: LLM, text: str) -> None:
        self.refuse(speaking, text, "expected text that UTF-8 can encode, got '.*ud.*'")

    def test_a_lone_surrogate_in_a_chat(self, speaking: LLM) -> None:
        self.refuse(
            speaking,
            [{"role": "user", "content": "w1 \ud800"}],
            "expected text that UTF-8 can encode, got 'w1 .*ud800 w9'",
        )

    @pytest.mark.parametrize(
        "content", [None, 5, ["w1"], [{"type": "text", "text": "w1"}]], ids=str
    )
    def test_content_that_is_no_text(self, speaking: LLM, content: Any) -> None:
        self.refuse(
            speaking,
            [{"role": "user", "content": content}],
            "expected 'role' and 'content' to be strings, got .*",
        )

    @pytest.mark.parametrize("role", [None, 5])
    def test_a_role_that_is_no_text(self, speaking: LLM, role: Any) -> None:
        self.refuse(
            speaking,
            [{"role": role, "content": "w1"}],
            "expected 'role' and 'content' to be strings, got .*",
        )

    def test_messages_that_the_template_refuses(self, speaking: LLM) -> None:
        self.refuse(
            speaking,
            [{"role": "system", "content": "w1"}],
            "the model's chat template refuses the messages: no system messages",
        )

    @pytest.mark.parametrize("template", ["{{ messages[0].name.first }}", "{% if %}"])
    def test_a_template_that_fails(
        self, speaking: LLM, sentencepiece: Any, monkeypatch: pytest.MonkeyPatch, template: str
    ) -> None:
        monkeypatch.setattr(sentencepiece, "chat_template", template)
        self.refuse(
            speaking,
            [{"role": "user", "content": "w1"}],
            "the model's chat template refuses the messages: .*",
        )

    def test_no_template(
        self, speaking: LLM, sentencepiece: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sentencepiece, "chat_template", None)
        self.refuse(
            speaking,
            [{"role": "user", "content": "w1"}],
            "expected a string or token ids, since this model has no chat template",
        )

    @pytest.mark.parametrize(
        "messages",
        [
            [{"role": "user"}],
            [{"content": "w1"}],
            [{}],
            [{"role": "user", "content": "w1"}, "w2"],
            [{"role": "user", "content": "w1"}, 5],
        ],
        ids=str,
    )
    def test_lists_that_are_no_chats(self, speaking: LLM, messages: Any) -> None:
        self.refuse(speaking, messages, "expected a string, messages .*, got a list with .*")

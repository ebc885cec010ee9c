"""The text of a continuation as its tokens come, against decoding everything at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from deinfer_jax.checkpoint.source import open_checkpoint
from deinfer_jax.engine.text import TextStream

WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS += ["▁", "▁▁", "▁w1", "▁w2", "ly", ",", "▁a", "▁n", "'", "t", ".", "▁.", "▁'", "s", "▁x"]
BOS, EOS = 1, 2


def ids_of(*pieces: str | bytes) -> list[int]:
    """Ids of pieces, or of each byte, in WORDS."""
    return [
        id
        for piece in pieces
        for id in ([3 + b for b in piece] if isinstance(piece, bytes) else [WORDS.index(piece)])
    ]


def wrap(tokenizer: Any, **options: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **options)


def words_tokenizer(*decoders_: Any, **options: Any) -> Any:
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordLevel

    tokenizer: Any = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(list(decoders_))
    return wrap(tokenizer, **options)


@pytest.fixture(scope="module")
def fallback() -> Any:
    """As of Llama 2, with all 256 bytes: decoding drops a first blank."""
    from tokenizers import decoders

    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    return words_tokenizer(replace, decoders.ByteFallback(), decoders.Fuse(), strip)


@pytest.fixture(scope="module")
def cleaning() -> Any:
    """Words, with the clean-up that takes blanks away again (`w1 .` becomes `w1.`)."""
    from tokenizers import decoders

    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    return words_tokenizer(replace, decoders.Fuse(), strip, clean_up_tokenization_spaces=True)


@pytest.fixture(scope="module")
def byte_level() -> Any:
    """Byte-level BPE: id b is byte b, then some tokens that are parts of characters, or more."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    more = [" w1", " w2", "abc", "\n", "  ", "é", "中", b" \xf0\x9f", b"\x98\x80!", b"x\xe4\xb8"]
    more += [b"\xad\xe5", b"\x9b\xbd", b"\xcc\x81", b"\xff\xfe", b"\xef\xbf\xbd"]
    alphabet = byte_characters()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet]
    for piece in more:
        piece = "".join(
            alphabet[b] for b in (piece if isinstance(piece, bytes) else piece.encode())
        )
        if piece not in pieces:
            pieces.append(piece)
    tokenizer: Any = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return wrap(tokenizer, additional_special_tokens=["<|im_end|>"])


def byte_characters() -> list[str]:
    """The character that GPT-2 writes for each byte: itself where it prints, else from U+0100."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in prints else next(others)) for byte in range(256)]


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Any:
    return open_checkpoint(smollm2_gguf).tokenizer()


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True)


def at_once(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """What decoding everything has behind the prompt; see TextStream."""
    before, both = decode(tokenizer, prompt), decode(tokenizer, [*prompt, *ids])
    return both[len(before) :] if both.startswith(before) else decode(tokenizer, ids)


def stream(
    tokenizer: Any, prompt: Sequence[int], ids: Sequence[int], stop: Sequence[str] = ()
) -> tuple[list[str], TextStream]:
    """What each token gave, and last what finish gave."""
    made = TextStream(tokenizer, prompt, stop)
    given = []
    for id in ids:
        ended = made.push(id)
        given.append(made.take())
        assert ended == (made.found is not None)
        if ended:
            break
    made.finish()
    given.append(made.take())
    assert made.take() == ""
    assert made.text == "".join(given)
    return given, made


class TestCharacters:
    """No increment has a part of a character."""

    @pytest.mark.parametrize("text", ["a😀b", "中国字", "e\u0301x", "👩‍👩‍👧 ok", "ü", "a\ufffdb"])
    def test_bytes(self, byte_level: Any, fallback: Any, text: str) -> None:
        data = text.encode()
        for tokenizer, ids in ((byte_level, list(data)), (fallback, ids_of(data))):
            prompt = [] if tokenizer is byte_level else ids_of("▁w1")
            given, made = stream(tokenizer, prompt, ids)
            assert made.text == text
            # A character comes with its last byte, but for U+FFFD, which might be a part of one.
            for end in range(1, len(data) + 1):
                sure = data[:end].decode(errors="ignore").rstrip("\ufffd")
                assert "".join(given[:end]) in (sure, sure + "\ufffd")

    def test_tokens_that_are_more_than_a_part(self, byte_level: Any) -> None:
        words = [b" \xf0\x9f", b"\x98\x80!", b"x\xe4\xb8", b"\xad\xe5", b"\x9b\xbd"]
        characters = byte_characters()
        ids = [
            byte_level.convert_tokens_to_ids("".join(characters[b] for b in word)) for word in words
        ]
        given, _ = stream(byte_level, [], ids)
        assert given == [" ", "😀!", "x", "中", "国", ""]

    def test_the_end_is_broken(self, byte_level: Any, fallback: Any) -> None:
        given, made = stream(byte_level, [], list(b"ab\xf0\x9f\x98"))
        assert given == ["a", "b", "", "", "", "\ufffd"]
        assert made.text == decode(byte_level, list(b"ab\xf0\x9f\x98"))
        given, made = stream(fallback, ids_of("▁w1"), ids_of("▁w2", b"\xe4\xb8"))
        assert given == [" w2", "", "", "\ufffd\ufffd"]

    @pytest.mark.parametrize("broken", [b"\xff", b"\xe4", b"\xf0\x9f\x98", b"\xff\xfe" * 20])
    def test_broken_bytes_in_between(self, byte_level: Any, fallback: Any, broken: bytes) -> None:
        ids = list(b"ab" + broken + b" cd")
        given, made = stream(byte_level, [], ids)
        assert made.text == decode(byte_level, ids)
        assert given[-3:] == ["c", "d", ""]
        ids = ids_of("▁w2", broken, "▁w1", "ly")
        given, made = stream(fallback, ids_of("▁w1"), ids)
        assert made.text == at_once(fallback, ids_of("▁w1"), ids)
        assert given[-3:] == ["\ufffd" * min(3, len(broken)) + " w1", "ly", ""]

    def test_broken_bytes_for_ever(self, byte_level: Any, fallback: Any) -> None:
        for tokenizer, ids in ((byte_level, [255] * 100), (fallback, ids_of(b"\xff" * 100))):
            given, made = stream(tokenizer, [], ids)
            assert made.text == "\ufffd" * 100
            assert len("".join(given[:-1])) == 97  # the last three could be of one character

    def test_a_broken_run_longer_than_the_window(self, fallback: Any) -> None:
        # At once, one broken byte makes all bytes of its run U+FFFD, however far away. Here that
        # is so as long as the window has bytes that are broken by themselves: it cannot start so
        # that they look whole, if they are of characters of several bytes.
        for many in range(1, 20):
            ids = ids_of("▁w2", b"\xff" * many, "中ü😀".encode() * 20, "▁w1")
            assert stream(fallback, [], ids)[1].text == decode(fallback, ids)
        # Plain letters look whole wherever the window starts.
        given, made = stream(fallback, [], ids_of("▁w2", b"\xff", b"A" * 60, "▁w1"))
        assert made.text.startswith("w2\ufffd") and made.text.endswith("AA w1")
        assert len(made.text) == len("w2") + 61 + len(" w1")
        for many in range(40, 60):  # and it goes on as ever
            ids = ids_of(b"\xff", b"A" * many, "ü".encode(), b"\xc3\xff", "▁w2")
            assert stream(fallback, [], ids)[1].text.endswith("AAü\ufffd\ufffd w2")
        ids = ids_of(b"\xff", b"A" * 14, "ü".encode(), b"\xc3\xff", "▁w2")
        assert stream(fallback, [], ids)[1].text == "\ufffd" * 19 + " w2"


class TestByteFallback:
    """Where decoding at once takes characters back, the text keeps them."""

    def test_a_character_is_given_at_once(self, fallback: Any) -> None:
        given, _ = stream(fallback, ids_of("▁w1"), ids_of("中国".encode(), "▁w2"))
        assert given == ["", "", "中", "", "", "国", " w2", ""]

    @pytest.mark.parametrize(
        ("ids", "text", "whole"),
        [
            (ids_of("中".encode(), b"\xff", "▁w2"), "中\ufffd w2", "\ufffd" * 4 + " w2"),
            (ids_of("ü".encode(), b"\xc3"), "ü\ufffd", "\ufffd" * 3),
            (ids_of("ü".encode(), b"\xff", "中".encode()), "ü" + "\ufffd" * 4, "\ufffd" * 6),
        ],
    )
    def test_a_run_breaks_after_whole_characters(
        self, fallback: Any, ids: list[int], text: str, whole: str
    ) -> None:
        assert decode(fallback, ids) == whole
        assert stream(fallback, [], ids)[1].text == text

    def test_it_breaks_while_the_window_is_full(self, fallback: Any) -> None:
        for many in range(1, 40):
            ids = ids_of("▁w1") * many + ids_of("ü".encode(), b"\xc3\xff", "▁w2")
            made = stream(fallback, ids_of("▁w1"), ids)[1]
            assert made.text == " w1" * many + "ü\ufffd\ufffd w2"

    def test_bytes_behind_a_prompt_of_bytes(self, fallback: Any) -> None:
        # The run has begun long before the window does.
        prompt = ids_of("▁w1", "中国字".encode() * 10)
        given, made = stream(fallback, prompt, ids_of("国字".encode(), "▁w2"))
        assert given == ["", "", "国", "", "", "字", " w2", ""]


class TestSeam:
    """Between prompt and continuation."""

    def test_a_first_blank_is_kept(self, fallback: Any, sentencepiece: Any) -> None:
        assert stream(fallback, ids_of("<s>", "▁w1"), ids_of("▁w2"))[0] == [" w2", ""]
        assert stream(sentencepiece, [1, 8], [9, 10])[0] == [" w2", " w3", ""]

    def test_a_first_blank_is_dropped_at_the_beginning(self, fallback: Any) -> None:
        for prompt in ([], [BOS], [BOS] * 40):
            assert stream(fallback, prompt, ids_of("▁w2", "▁w1"))[0] == ["w2", " w1", ""]

    @pytest.mark.parametrize("blanks", [["▁"], ["▁▁"], ["▁"] * 30])
    def test_blanks(self, fallback: Any, blanks: list[str]) -> None:
        for prompt in ([], [BOS], ids_of("▁w1"), ids_of("▁"), ids_of("▁w1", *blanks)):
            ids = ids_of(*blanks, "▁w2")
            given, made = stream(fallback, prompt, ids)
            assert made.text == at_once(fallback, prompt, ids)

    def test_special_tokens_at_the_end_of_the_prompt(self, fallback: Any) -> None:
        # They are more than the window holds; the blank must not be lost.
        for many in (1, 20, 200):
            given, made = stream(fallback, ids_of("▁w1") + [EOS] * many, ids_of("▁w2", "▁w1"))
            assert given == [" w2", " w1", ""]

    @pytest.mark.parametrize(
        ("prompt", "ids"),
        [
            (b"a\xf0\x9f", b"\x98"),
            (b"a\xf0\x9f", b"\x98 b"),
            (b"a\xf0\x9f", b"\x98\x80 b"),
            (b"a\xf0\x9f", b" b"),
            (b"a\xe4\xb8", b"\xad\xe4\xb8\xad" * 20),
            (b"\xe4" * 30, b"\xb8\xadx"),
        ],
    )
    def test_a_character_spans_it(
        self, byte_level: Any, fallback: Any, prompt: bytes, ids: bytes
    ) -> None:
        made = stream(byte_level, list(prompt), list(ids))[1]
        assert made.text == at_once(byte_level, list(prompt), list(ids))
        words = ids_of("▁w1", prompt), ids_of(ids, "▁w2")
        assert stream(fallback, *words)[1].text == at_once(fallback, *words)


class TestSpecialTokens:
    """They are not shown, and leave no trace."""

    def test_they_give_nothing(self, fallback: Any) -> None:
        ids = [BOS, *ids_of("▁w2"), EOS, *ids_of("ly"), EOS, EOS, *ids_of("▁w1")]
        given, made = stream(fallback, ids_of("▁w1"), ids)
        assert given == ["", " w2", "", "ly", "", "", " w1", ""]

    def test_more_of_them_than_the_window_holds(self, fallback: Any, byte_level: Any) -> None:
        ids = ids_of("▁w2") + [EOS] * 50 + ids_of("▁w1")
        assert stream(fallback, [], ids)[1].text == "w2 w1"
        end = byte_level.convert_tokens_to_ids("<|im_end|>")
        assert stream(byte_level, [], [*b"a ", *[end] * 50, *b" b"])[1].text == "a  b"

    def test_inside_a_character(self, byte_level: Any) -> None:
        end = byte_level.convert_tokens_to_ids("<|im_end|>")
        given, _ = stream(byte_level, [], [0xE4, end, 0xB8, end, 0xAD])
        assert given == ["", "", "", "", "中", ""]

    def test_ids_beyond_the_vocabulary(self, fallback: Any) -> None:
        ids = [9999] * 50 + ids_of("▁w2") + [9999] * 50 + ids_of("▁w1")
        assert stream(fallback, ids_of("▁w1"), ids)[1].text == " w2 w1"

    def test_added_tokens_that_are_not_special(self, byte_level: Any) -> None:
        think = byte_level.convert_tokens_to_ids("<think>")
        assert stream(byte_level, [], [think, *b"a", think])[1].text == "<think>a<think>"


def first_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first, by trying every end."""
    for end in range(len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


class TestStopStrings:
    """The one that is complete first ends the text."""

    @pytest.mark.parametrize(
        ("text", "stop", "given", "found"),
        [
            ("abcde", ["cd"], ["a", "b", "", "", ""], "cd"),
            ("abce", ["cd"], ["a", "b", "", "ce", ""], None),
            ("abc", ["cd"], ["a", "b", "", "c"], None),
            ("xaaab", ["aab"], ["x", "", "", "a", "", ""], "aab"),
            ("ababac", ["abac"], ["", "", "", "ab", "", "", ""], "abac"),
            ("abcdef", ["abcdef", "cd"], ["", "", "", "ab", ""], "cd"),
            ("xab", ["b", "ab"], ["x", "", "", ""], "ab"),
            ("xab", ["ab", "abc"], ["x", "", "", ""], "ab"),
            ("zyx", ["x", "y"], ["z", "", ""], "y"),
        ],
        ids=[
            "over tokens",
            "not one after all",
            "not one at the end",
            "overlaps itself",
            "begins again",
            "a shorter one inside",
            "the same end",
            "the same start",
            "earlier",
        ],
    )
    def test_byte_by_byte(
        self, byte_level: Any, text: str, stop: list[str], given: list[str], found: str | None
    ) -> None:
        got, made = stream(byte_level, list(b"prompt"), list(text.encode()), stop)
        assert made.found == found
        assert (made.text, found) == first_stop(text, stop)
        assert got == given

    def test_inside_a_token(self, fallback: Any) -> None:
        for stop, text in (["w"], " "), (["▁"], " w2"), (["2"], " w"), ([" w"], ""):
            assert stream(fallback, ids_of("▁w1"), ids_of("▁w2"), stop)[1].text == text

    def test_across_a_character_of_several_bytes(self, byte_level: Any) -> None:
        given, made = stream(byte_level, [], list("a中国b".encode()), ["中国"])
        assert made.found == "中国" and made.text == "a"

    def test_the_prompt_does_not_count(self, byte_level: Any) -> None:
        _, made = stream(byte_level, list(b"a STOP b ST"), list(b"OP cST"), ["STOP"])
        assert made.found is None and made.text == "OP cST"

    def test_nothing_comes_after_it(self, byte_level: Any) -> None:
        made = TextStream(byte_level, [], ["b"])
        assert [made.push(id) for id in b"ab"] == [False, True]
        with pytest.raises(AssertionError, match="the text has ended"):
            made.push(99)
        made.finish()
        assert (made.text, made.found) == ("a", "b")

    def test_nothing_comes_after_finish(self, byte_level: Any) -> None:
        made = TextStream(byte_level, [])
        made.finish()
        with pytest.raises(AssertionError, match="the text has ended"):
            made.push(99)

    def test_an_empty_one(self, byte_level: Any) -> None:
        with pytest.raises(AssertionError, match="an empty stop string in"):
            TextStream(byte_level, [], ["a", ""])

    def test_one_that_only_the_end_completes(self, byte_level: Any) -> None:
        _, made = stream(byte_level, [], list(b"ab\xe4"), ["b\ufffd"])
        assert (made.text, made.found) == ("a", "b\ufffd")

    def test_two_in_a_token(self, byte_level: Any) -> None:
        abc = byte_level.convert_tokens_to_ids("abc")
        for stop, text in (["abc", "b"], "a"), (["c", "b"], "a"), (["bc", "abc"], ""):
            assert stream(byte_level, [], [abc], stop)[1].text == text

    def test_one_where_the_window_is_cut(self, fallback: Any) -> None:
        ids = ids_of("▁w1", b"\xff", b"A" * 60)
        text = stream(fallback, [], ids)[1].text
        for size in range(1, 40):
            for stop in ["\ufffd" * size], ["w1" + "\ufffd" * size]:
                made = stream(fallback, [], ids, stop)[1]
                assert (made.text, made.found) == first_stop(text, stop)

    def test_random_ones(self, byte_level: Any) -> None:
        rng = random.Random(0)
        tokens = [*b"abc \xe4\xb8\xad", *range(256, len(byte_level))]
        found = 0
        for _ in range(1000):
            ids = rng.choices(tokens, k=rng.randint(1, 30))
            text = decode(byte_level, ids)
            stop = ["".join(rng.choices("abcx 中", k=rng.randint(1, 3))) for _ in range(2)]
            for _ in range(2):  # they are there
                start = rng.randrange(max(1, len(text)))
                stop.append(text[start : start + rng.randint(1, 9)] or "a")
            made = stream(byte_level, list(b"ab"), ids, stop)[1]
            assert (made.text, made.found) == first_stop(text, stop)
            found += made.found is not None
        assert found > 900

    def test_only_what_may_become_one_is_held(self, byte_level: Any) -> None:
        rng = random.Random(1)
        for _ in range(200):
            stop = ["".join(rng.choices("ab", k=rng.randint(2, 8))) for _ in range(2)]
            text = "".join(rng.choices("ab", k=30))
            made = TextStream(byte_level, [], stop)
            for end, id in enumerate(text.encode(), 1):
                if made.push(id):
                    break
                held = text[len(made.text) : end]
                assert text.startswith(made.text)
                assert not held or any(s.startswith(held) for s in stop)
                longer = text[:end][-len(held) - 1 :]
                assert len(longer) == len(held) or not any(s.startswith(longer) for s in stop)


def random_ids(rng: random.Random, tokenizer: Any, kind: str) -> list[int]:
    size, words = rng.randint(1, 60), len(tokenizer)
    if kind == "any":
        return rng.choices(range(words), k=size)
    # Parts of characters, broken or not, among words: the small tokenizers' bytes are first, those
    # of SmolLM2 are behind its special tokens.
    pools = [range(300), range(128, 256), range(17, 273), range(2, 8)]
    pool = [id for id in rng.choice(pools) if id < words] or range(2, 5)
    return rng.choices(pool, k=size)


@pytest.mark.parametrize("kind", ["any", "bytes"])
class TestRandomTokens:
    """Whatever the tokens and the rhythm, the text is that of decoding at once."""

    def check(self, tokenizer: Any, rng: random.Random, prompt: list[int], ids: list[int]) -> str:
        made = TextStream(tokenizer, prompt)
        given = ""
        for id in ids:
            assert made.push(id) is False
            if rng.random() < 0.4:
                given += made.take()
                assert given == made.text
        made.finish()
        given += made.take()
        assert given == made.text
        return given

    @pytest.mark.parametrize("name", ["byte_level", "smollm2"])
    def test_byte_level(self, request: pytest.FixtureRequest, name: str, kind: str) -> None:
        tokenizer, rng = request.getfixturevalue(name), random.Random(2)
        for _ in range(400):
            prompt = random_ids(rng, tokenizer, kind)[: rng.choice([0, 1, 5, 60])]
            ids = random_ids(rng, tokenizer, kind)
            assert self.check(tokenizer, rng, prompt, ids) == at_once(tokenizer, prompt, ids)

    @pytest.mark.parametrize("name", ["fallback", "sentencepiece"])
    def test_byte_fallback(self, request: pytest.FixtureRequest, name: str, kind: str) -> None:
        """Decoding at once makes *all* bytes of a run U+FFFD if one is broken. So a run that breaks
        after whole characters has other text here, and as bytes only differ there, that is all."""
        tokenizer, rng = request.getfixturevalue(name), random.Random(3)
        equal = 0
        for _ in range(400):
            prompt = random_ids(rng, tokenizer, kind)[: rng.choice([0, 1, 5, 60])]
            ids = random_ids(rng, tokenizer, kind)
            if name == "fallback":  # no bytes that are letters: they tell words and bytes apart
                prompt, ids = ([t for t in x if not 3 <= t < 131] for x in (prompt, ids))
            text, whole = self.check(tokenizer, rng, prompt, ids), at_once(tokenizer, prompt, ids)
            if self.is_stable(tokenizer, prompt, ids):
                assert text == whole
                equal += 1
            else:
                assert text.encode("ascii", "ignore") == whole.encode("ascii", "ignore")
                assert "\ufffd" in whole
        assert equal > 40

    def is_stable(self, tokenizer: Any, prompt: list[int], ids: list[int]) -> bool:
        """Whether decoding at once never takes back what it has given but for U+FFFD at the end."""
        whole = decode(tokenizer, [*prompt, *ids])
        shorter = (decode(tokenizer, [*prompt, *ids[:end]]) for end in range(len(ids)))
        return all(whole.startswith(text.rstrip("\ufffd")) for text in shorter)


class TestRealText:
    """Text of several scripts comes as it was, and promptly."""

    TEXT = (
        "The quick brown fox – “jumps” over 13 lazy dogs. 中文字符，日本語、한국어 и русский.\n\n"
        "\tdef f(x):\n        return x ** 2  # 😀👩‍👩‍👧 e\u0301\r\n   <b>it's</b> n't ' . ! ?  "
    )

    def test_smollm2(self, smollm2: Any) -> None:
        prompt = smollm2("Say: ")["input_ids"]
        ids = smollm2(self.TEXT)["input_ids"]
        made = TextStream(smollm2, prompt)
        for end, id in enumerate(ids, 1):
            made.push(id)
            assert made.text == decode(smollm2, ids[:end]).rstrip("\ufffd")
        made.finish()
        assert made.text == self.TEXT

    def test_its_bytes(self, fallback: Any) -> None:
        given, made = stream(fallback, ids_of("▁w1"), ids_of(self.TEXT.encode()))
        assert made.text == self.TEXT
        assert given[-1] == ""


class TestCleanUp:
    """A tokenizer that takes blanks away again: a blank is held until it is sure to stay."""

    def test_it_cleans(self, cleaning: Any) -> None:
        # Otherwise the tests below would show nothing.
        assert decode(cleaning, ids_of("▁w1", "▁.")) == "w1."
        assert decode(cleaning, ids_of("▁w1", "▁'", "▁", "s")) == "w1's"

    def test_a_blank_is_held(self, cleaning: Any) -> None:
        given, _ = stream(cleaning, ids_of("▁w2"), ids_of("▁w1", "▁", ".", "▁w2"))
        assert "".join(given[:2]) == " w1"
        assert "".join(given) == " w1. w2"

    def test_short_words_come(self, cleaning: Any) -> None:
        given, made = stream(cleaning, ids_of("▁w1"), ids_of("▁a", "▁x") * 30)
        assert made.text == " a x" * 30
        assert len("".join(given[:-1])) >= len(made.text) - 3

    def test_random_words(self, cleaning: Any) -> None:
        rng = random.Random(4)
        pieces = ["▁", "▁w1", "ly", ",", "▁a", "▁n", "'", "t", ".", "▁.", "▁'", "s", "</s>"]
        for _ in range(1000):
            prompt = ids_of(*rng.choices(pieces, k=rng.randint(0, 8)))
            ids = ids_of(*rng.choices(pieces, k=rng.randint(1, 16)))
            assert stream(cleaning, prompt, ids)[1].text == at_once(cleaning, prompt, ids)

    def test_long_texts(self, cleaning: Any) -> None:
        rng = random.Random(5)
        pieces = ["▁w1", "▁w2", "▁x", "ly", "▁.", "▁'", "s", "t", "▁n", ","]
        for _ in range(100):
            ids = ids_of(*rng.choices(pieces, [9, 9, 3, 1, 2, 1, 1, 1, 1, 1], k=200))
            assert stream(cleaning, ids_of("▁w1"), ids)[1].text == at_once(
                cleaning, ids_of("▁w1"), ids
            )

    def test_blanks_without_end(self, cleaning: Any) -> None:
        given, made = stream(cleaning, ids_of("▁w1"), ids_of("▁") * 100 + ids_of("▁w2"))
        assert made.text == " " * 101 + "w2"
        assert len("".join(given[:100])) > 80

    def test_bpe_is_not_cleaned(self, byte_level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(byte_level, "clean_up_tokenization_spaces", True)
        given, _ = stream(byte_level, [], list(b"a . n't"))
        assert given == [*"a . n't", ""]


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.tokens = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, ids: list[int], **options: Any) -> str:
        self.tokens += len(ids)
        return self.tokenizer.decode(ids, **options)


class TestCost:
    """A token costs the same wherever it comes."""

    @pytest.mark.parametrize(
        ("name", "next_id", "most"),
        [
            ("byte_level", lambda i: i * 7 % 95 + 32, 15),
            ("byte_level", lambda i: "中文😀".encode()[i % 10], 24),
            ("byte_level", lambda i: i * 97 % 256, 24),
            ("byte_level", lambda i: 0xFF, 24),
            ("byte_level", lambda i: 0x20, 15),
            ("fallback", lambda i: EOS, 24),
            ("fallback", lambda i: ids_of("▁", "▁w1")[i % 2], 24),
            ("fallback", lambda i: ids_of("中".encode())[i % 3], 24),
            ("fallback", lambda i: ids_of(b"\xff")[0], 32),
            ("fallback", lambda i: ids_of(b"\xffAAAAAAAAAA")[min(i, 5)], 32),
            ("cleaning", lambda i: ids_of("▁n")[0], 40),
            ("cleaning", lambda i: ids_of("▁w1", "▁.")[i % 2], 24),
        ],
        ids=[
            "text",
            "characters",
            "anything",
            "broken",
            "blanks",
            "special",
            "words and blanks",
            "bytes",
            "broken bytes",
            "letters behind a broken byte",
            "a clean-up that waits",
            "a clean-up",
        ],
    )
    def test_of_2000_tokens(
        self,
        request: pytest.FixtureRequest,
        name: str,
        next_id: Callable[[int], int],
        most: int,
    ) -> None:
        tokenizer = Counting(request.getfixturevalue(name))
        made = TextStream(tokenizer, [65] * 5000, ["never that"])
        counts = []
        for i in range(2000):
            before = tokenizer.tokens
            made.push(next_id(i))
            counts.append(tokenizer.tokens - before)
        assert sum(counts) < most * 2000
        assert sum(counts[1000:]) <= sum(counts[:1000]) * 1.02
        assert max(counts) < 500
        assert len(made._window) <= 20

"""Tokenizers of GGUF files against transformers, llama.cpp and SentencePiece by its definition."""

import random
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deinfer_jax.checkpoint import open_checkpoint
from deinfer_jax.checkpoint.gguf_tokenizer import build_tokenizer

# Ids of SmolLM2 by llama.cpp's server (xllamacpp 2026.10.11549, /tokenize with parse_special).
LLAMA_CPP = {
    "Hello world": "19556 905",
    " leading and trailing  ": "2899 284 35079 256",
    "tabs\tand\n\n\nnew lines\r\n\r\n end": "100 7366 197 397 1116 198 2241 3204 18682 1112",
    "def f(x):\n    return x**2  # no": "1604 275 24 104 727 472 1003 1792 828 34 216 907 787",
    "don't DON'T we'Ve I'LL they'd": "12420 982 422 2154 23 68 392 23 25917 339 23 16421 502 6737",
    "2024-05-17 12:34": "34 32 34 36 29 32 37 29 33 39 216 33 34 42 35 36",
    "1,234,567 3.14e-10": "33 28 34 35 36 28 37 38 39 216 35 30 33 36 85 29 33 32",
    "½ ⅔ ² Ⅳ": "16738 216 173 223 238 216 19133 216 173 223 113",
    "٣٤ 𝟘": "164 113 164 114 216 23159 249 242",
    "naïve café é ü ß": "3546 46494 37366 26411 5549 137 5549 249",
    "Привет мир": "155 249 46879 16464 32547 41337 7872 9175",
    "日本語と中文": "23274 115 40993 179 120 248 7365 118 28589 29184",
    "שלום مرحبا": "38229 31838 23970 162 247 36395 20602 44626 31462 10805",
    "\U0001f469\u200d\U0001f467 \U0001f600": "10813 235 119 321 231 10813 235 117 40303 218",
    "\U0001f1e9\U0001f1ea": "10813 225 119 10813 225 120",
    "a\u200bb\xa0c\u3000d": "81 321 229 82 15442 83 12109 218 84",
    "<|im_start|>user\nhi<|im_end|>\n": "1 4093 198 6004 2 198",
    "<|endoftext|><file_sep>x": "0 5 104",
    '{"k": [1, 2.5, null]}': "39428 91 1799 933 33 28 216 34 30 37 28 10034 28852",
    "   x": "256 1792",
    "x   ": "104 333",
    "\t\t\ty": "1656 197 105",
    "snake_case camelCase HTTPServer2": "48284 79 7544 32782 10802 43335 10740 34",
    "\x00\x01\x04\x7f": "190 191 217",
    "á é": "81 151 219 297 151 219",
    "###!!!???...": "3757 29646 16693 47 2026",
    "\U00050000 \U000e0041": "234 218 218 216 188 250 219 219",
    "": "",
}


def torture(count: int) -> Iterator[str]:
    """Lines of mixed scripts, digits, blanks and code, the same in every run."""
    rng = random.Random(0)
    ranges = [(0x20, 0x7F), (0xA0, 0x250), (0x300, 0x320), (0x370, 0x460), (0x590, 0x650)]
    ranges += [(0x660, 0x66A), (0x900, 0x950), (0x2000, 0x2070), (0x2150, 0x2190)]
    ranges += [(0x4E00, 0x4E40), (0xAC00, 0xAC40), (0x1D7CE, 0x1D7FF), (0x1F600, 0x1F640)]
    pool = [chr(code) for start, stop in ranges for code in range(start, stop)]
    pool += list(" \t\n\r") * 30 + list("0123456789") * 10
    code = [
        "def ",
        "return",
        "(x)",
        "\n    ",
        "\t",
        " = ",
        "->",
        "'s",
        "I'LL",
        "12",
        ".5",
        "é",
        " ",
    ]
    for i in range(count):
        yield "".join(rng.choices(pool if i % 2 else code, k=rng.randrange(1, 60)))


# SmolLM2: byte-level BPE


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf) -> Any:
    return open_checkpoint(smollm2_gguf).tokenizer()


@pytest.fixture(scope="module")
def transformers_smollm2(smollm2_gguf) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


def check_against_transformers(ours: Any, theirs: Any, lines: list[str]) -> None:
    """Transformers does not cut at digits, as the file asks (``smollm``), so the test does."""
    pieces: list[list[str]] = []
    for line in lines:
        pieces.append([""])
        for char in line:
            if unicodedata.category(char).startswith("N"):
                pieces[-1] += [char, ""]
            else:
                pieces[-1][-1] += char
    flat = iter(theirs([piece for line in pieces for piece in line]).input_ids)
    for line, cut, ids in zip(lines, pieces, ours(lines).input_ids, strict=True):
        assert ids == [token for _ in cut for token in next(flat)], ascii(line)


def test_wikitext_agrees_with_transformers(smollm2, transformers_smollm2, data_dir):
    lines = (data_dir / "wikitext2_test.txt").read_text().split("\n")
    check_against_transformers(smollm2, transformers_smollm2, [line for line in lines if line])


def test_torture_agrees_with_transformers(smollm2, transformers_smollm2):
    check_against_transformers(smollm2, transformers_smollm2, list(torture(2000)))


@pytest.mark.parametrize("text", LLAMA_CPP, ids=ascii)
def test_ids_are_those_of_llama_cpp(smollm2, text):
    assert smollm2.encode(text) == [int(token) for token in LLAMA_CPP[text].split()]


def test_round_trip_of_wikitext(smollm2, data_dir):
    lines = (data_dir / "wikitext2_test.txt").read_text().split("\n")
    assert smollm2.batch_decode(smollm2(lines).input_ids) == lines


def test_round_trip_of_torture(smollm2):
    lines = list(torture(2000))
    assert smollm2.batch_decode(smollm2(lines).input_ids) == lines


def test_special_tokens_follow_the_file(smollm2):
    # transformers' own route says that <|im_start|> is the eos
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert (smollm2.unk_token_id, smollm2.pad_token_id) == (0, 2)
    assert smollm2.all_special_ids == [1, 2, 0]


def test_special_tokens_are_left_out_on_request(smollm2):
    ids = smollm2.encode("<|im_start|>user\nhi<|im_end|>")
    assert smollm2.decode(ids, skip_special_tokens=True) == "user\nhi"


def test_no_bos_where_the_file_says_so(smollm2):
    assert smollm2.encode("Hi") == smollm2.encode("Hi", add_special_tokens=False)


def test_chat_template(smollm2):
    chat = [{"role": "user", "content": "Hi"}]
    text = smollm2.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


# Pre-tokenizers and flags of byte-level BPE


def byte_level(pre: Any = "gpt-2", **changes: Any) -> dict[str, Any]:
    """Metadata of a tokenizer with all bytes, three merges and four special words."""
    from tokenizers.pre_tokenizers import ByteLevel

    words = [
        "<s>",
        "</s>",
        "<pad>",
        "[TOOL]",
        *sorted(ByteLevel.alphabet()),
        "ab",
        "abc",
        "Ġa",
        "12",
    ]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(words) - 4),
        "tokenizer.ggml.merges": ["a b", "ab c", "Ġ a", "1 2"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 2,
    }
    metadata |= {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def build(metadata: dict[str, Any]) -> Any:
    return build_tokenizer(metadata, Path("tiny.gguf"))


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 1234  x\n\ny", ["it", "'s", " 1234", " ", " x", "\n", "\n", "y"]),
        ("smollm", "it's 12  x", ["it", "'s", " ", "1", "2", " ", " x"]),
        (
            "llama-bpe",
            "IT'S 1234567\n\n x!?\n",
            ["IT", "'S", " ", "123", "456", "7", "\n\n", " x", "!?\n"],
        ),
        ("qwen2", "IT'S 123\n\n x", ["IT", "'S", " ", "1", "2", "3", "\n\n", " x"]),
        (
            "tekken",
            "camelCaseHTTP a/b/\n12",
            ["camel", "Case", "HTTP", " a", "/b", "/\n", "1", "2"],
        ),
        ("deepseek-coder", "ab, 中文\n12", ["ab", ",", " ", "中文", "\n", "1", "2"]),
        ("seed-coder", "a!?\n\n12", ["a", "!?", "\n\n", "1", "2"]),
        ("default", "a+1234, b", ["a", "+", "123", "4", ",", " b"]),
    ],
)
def test_pieces_of_pre_tokenizers(pre, text, pieces):
    pre_tokenizer = build(byte_level(pre)).backend_tokenizer.pre_tokenizer
    assert [text[start:stop] for _, (start, stop) in pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_whole_words_need_no_merges_in_llama3():
    words = byte_level("llama-bpe", ggml__merges=["a b"], ggml__add_bos_token=False)
    assert build(words).tokenize("abc") == ["abc"]
    assert build(words | {"tokenizer.ggml.pre": "gpt-2"}).tokenize("abc") == ["ab", "c"]


def test_qwen2_composes():
    tokenizer = build(byte_level("qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


@pytest.mark.parametrize(
    ("pre", "flags", "ends"),
    [
        ("gpt-2", {}, (False, False)),
        ("llama-bpe", {}, (True, False)),
        ("tekken", {}, (True, False)),
        ("llama-bpe", {"ggml__add_bos_token": False}, (False, False)),
        ("gpt-2", {"ggml__add_bos_token": True, "ggml__add_eos_token": True}, (True, True)),
        ("llama-bpe", {"ggml__bos_token_id": None}, (False, False)),
    ],
)
def test_bos_and_eos(pre, flags, ends):
    tokenizer = build(byte_level(pre, **flags))
    ids = tokenizer.encode("ab")
    assert (ids[0] == 0, ids[-1] == 1) == ends
    assert tokenizer.encode("ab", add_special_tokens=False) == [260]
    assert (tokenizer.add_bos_token, tokenizer.add_eos_token) == ends


def test_pair_has_bos_and_eos_in_both_parts():
    flags = {"ggml__add_bos_token": True, "ggml__add_eos_token": True}
    tokenizer = build(byte_level(**flags))
    assert tokenizer("ab", "abc").input_ids == [0, 260, 1, 0, 261, 1]


def test_user_defined_words_are_whole_but_not_special():
    tokenizer = build(byte_level())
    ids = tokenizer.encode("ab[TOOL]<s>")
    assert ids == [260, 3, 0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab[TOOL]"


def test_missing_pre_means_default():
    pieces = build(byte_level(None)).backend_tokenizer.pre_tokenizer.pre_tokenize_str("1234")
    assert [piece for piece, _ in pieces] == ["123", "4"]


def test_named_chat_templates():
    tokenizer = build(
        byte_level(
            chat_template="plain {{ messages[0].content }}",
            chat_templates=["tool_use"],
            chat_template__tool_use="tools {{ messages[0].content }}",
        )
    )
    chat = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "plain x"
    text = tokenizer.apply_chat_template(chat, tokenize=False, chat_template="tool_use")
    assert text == "tools x"


# SentencePiece

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """Metadata of a tokenizer whose pieces are the most frequent substrings of a small text."""
    text = (
        "▁the▁cat▁sat▁on▁the▁mat▁with▁a▁hat▁and▁that▁was▁the▁end▁of▁the▁tale▁at▁last,▁12▁of▁them."
    )
    counts = Counter(text[i : i + n] for n in range(2, 6) for i in range(len(text) - n + 1))
    pieces = [piece for piece, count in counts.most_common() if count > 1]
    pieces += ["aa", "aaa", "aaaa", "▁▁", "▁▁▁"]
    letters = sorted(set(text) | {"x", "é"})
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces, *letters, "[TOOL]"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259
        + [-float(rank) for rank in range(len(pieces))]
        + [-1e6 - i for i in range(len(letters))]
        + [0.0],
        "tokenizer.ggml.token_type": [2, 3, 3]
        + [6] * 256
        + [1] * (len(pieces) + len(letters))
        + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    metadata |= {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def join_best_neighbours(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece BPE by its definition: join the best neighbours, leftmost first, to the end."""
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds, scores = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens) if kinds[i] == 1}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(i, ids.get(parts[i] + parts[i + 1])) for i in range(len(parts) - 1)]
        ranked = [(-scores[token], i) for i, token in joined if token is not None]
        if not ranked:
            break
        _, at = min(ranked)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    out: list[int] = []
    for part in parts:
        out += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return out


def sentences(count: int) -> list[str]:
    rng = random.Random(1)
    words = [
        "the",
        "cat",
        "that",
        "hat",
        "aaaaa",
        "aa",
        "x",
        "é",
        "ü",
        "12",
        " ",
        "\n",
        ",",
        "them.",
    ]
    return [" ".join(rng.choices(words, k=rng.randrange(1, 12))) for _ in range(count)]


def test_sentencepiece_by_its_definition():
    metadata = sentencepiece()
    tokenizer = build(metadata)
    for text in sentences(500):
        assert tokenizer.encode(text, add_special_tokens=False) == join_best_neighbours(
            metadata, text
        )


def test_sentencepiece_agrees_with_transformers(write_gguf: Callable[..., Path]):
    from transformers import AutoTokenizer

    metadata = sentencepiece()

    def words(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(metadata["tokenizer.ggml.tokens"])
        writer.add_token_scores(metadata["tokenizer.ggml.scores"])
        writer.add_token_types(metadata["tokenizer.ggml.token_type"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    path = write_gguf({}, tokenizer=words, keys={"vocab_size": 300})
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = build(metadata)
    for text in sentences(300):
        wanted = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == wanted


def test_sentencepiece_round_trip():
    tokenizer = build(sentencepiece())
    texts = sentences(300) + ["  two blanks", "日本語 😀", "tab\tand\r\nnew line "]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_sentencepiece_starts_with_bos_and_a_blank():
    tokenizer = build(sentencepiece())
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the")) == ["<s>", "▁the"]


def test_sentencepiece_without_a_blank_in_front():
    tokenizer = build(sentencepiece(ggml__add_space_prefix=False, ggml__add_bos_token=False))
    ids = tokenizer.encode("the cat")
    assert "".join(tokenizer.convert_ids_to_tokens(ids)) == "the▁cat"
    assert tokenizer.decode(tokenizer.encode(" cat")) == " cat"


def test_sentencepiece_falls_back_to_bytes():
    ids = build(sentencepiece()).encode("ü", add_special_tokens=False)
    assert ids[1:] == [3 + 0xC3, 3 + 0xBC]


def test_sentencepiece_without_bytes_says_unknown():
    kinds = sentencepiece()["tokenizer.ggml.token_type"]
    tokenizer = build(
        sentencepiece(
            ggml__token_type=[1 if kind == 6 else kind for kind in kinds],
            ggml__unknown_token_id=None,
        )
    )
    assert tokenizer.encode("ü", add_special_tokens=False)[1:] == [0]


def test_sentencepiece_special_and_user_defined_words():
    tokenizer = build(sentencepiece())
    ids = tokenizer.encode("<s>[TOOL]</s>", add_special_tokens=False)
    assert ids == [1, len(tokenizer) - 1, 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "[TOOL]"


def test_literal_bytes_are_no_bytes():
    tokenizer = build(sentencepiece())
    ids = tokenizer.encode("<0x41>", add_special_tokens=False)
    assert tokenizer.decode(ids) == "<0x41>" and 3 + 0x41 not in ids


# What is refused


def test_file_without_tokenizer(write_gguf, tiny_weights):
    checkpoint = open_checkpoint(write_gguf(tiny_weights()))
    with pytest.raises(FileNotFoundError, match="tiny.gguf: the file has no tokenizer"):
        checkpoint.tokenizer()


def test_unknown_tokenizer():
    with pytest.raises(ValueError, match="tokenizer 't5' is not supported; supported: gpt2, llama"):
        build(byte_level(ggml__model="t5"))


def test_unknown_pre_tokenizer_lists_the_supported():
    with pytest.raises(ValueError, match="'klingon' is not supported; supported: gpt-2, .*smollm"):
        build(byte_level("klingon"))


@pytest.mark.parametrize("words", [None, []])
def test_no_words(words):
    with pytest.raises(ValueError, match="expected metadata 'tokenizer.ggml.tokens'"):
        build(byte_level(ggml__tokens=words))


def test_words_listed_twice():
    words = byte_level()["tokenizer.ggml.tokens"]
    with pytest.raises(ValueError, match="expected distinct tokens, got 'ab' twice"):
        build(byte_level(ggml__tokens=[*words[:-1], "ab"]))


def test_types_of_other_length():
    with pytest.raises(ValueError, match="a token type for each of 264 tokens, got 2"):
        build(byte_level(ggml__token_type=[1, 1]))


def test_special_id_outside_the_vocabulary():
    with pytest.raises(ValueError, match="eos_token_id: expected an id below 264, got 264"):
        build(byte_level(ggml__eos_token_id=264))


def test_no_merges():
    with pytest.raises(ValueError, match="expected metadata 'tokenizer.ggml.merges'"):
        build(byte_level(ggml__merges=None))


def test_merge_of_one_piece():
    with pytest.raises(ValueError, match="merge: expected two pieces and a space, got 'ab'"):
        build(byte_level(ggml__merges=["ab"]))


def test_merge_of_unknown_words():
    with pytest.raises(ValueError, match="tiny.gguf: corrupt tokenizer: .*zz"):
        build(byte_level(ggml__merges=["zz a"]))


def test_no_scores():
    with pytest.raises(ValueError, match="expected a score for each of .* tokens, got none"):
        build(sentencepiece(ggml__scores=None))

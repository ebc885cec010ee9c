"""The tokenizer of a GGUF file, rebuilt from its metadata with the library ``tokenizers``.

Two kinds exist in the supported architectures: byte-level BPE (``gpt2``), whose pre-tokenizer the
file only names, and SentencePiece BPE (``llama``), whose merges follow from the pieces' scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deinfer_jax.checkpoint.source import import_transformers

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
SPACE = "▁"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 = rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}|{SYMBOLS}|{SPACES}"
QWEN2 = rf"{CONTRACTIONS}|{WORD}|\p{{N}}|{SYMBOLS}|{SPACES}"
SEED = rf"{CONTRACTIONS}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """Patterns that cut the text, each what the ones before left over, and what comes with them.

    ``ignore_merges``: a piece that is a word of the vocabulary is not merged from bytes.
    ``add_bos``: where the file does not say. ``nfc``: the text is composed first; llama.cpp does
    not, but the tokenizers that these models were trained with do.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2 = _PreTokenizer((GPT2,))
_DIGITS = _PreTokenizer((r"\p{N}", GPT2))
_LLAMA3 = _PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2 = _PreTokenizer((QWEN2,), nfc=True)
PRE_TOKENIZERS: dict[str, _PreTokenizer] = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "mellum": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "minerva-7b": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _PreTokenizer((LLAMA3,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "stablelm2": _PreTokenizer((QWEN2,)),
    "seed-coder": _PreTokenizer((SEED,)),
    "tekken": _PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-coder": _PreTokenizer(
        (
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            r"\p{N}",
        )
    ),
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def build_tokenizer(metadata: Mapping[str, Any], path: Path) -> PreTrainedTokenizerBase:
    """A transformers tokenizer that follows a GGUF file, special tokens and chat template included.

    Args:
        metadata: of the file, by key.
        path: of the file, for errors.

    Raises:
        FileNotFoundError: the file has no tokenizer.
        ValueError: an unsupported tokenizer or pre-tokenizer (the message lists the supported), or
            metadata that contradict each other.
    """

    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise FileNotFoundError(
            f"{path}: the file has no tokenizer (metadata 'tokenizer.ggml.model')"
        )
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        raise ValueError(
            f"{path}: tokenizer {model!r} is not supported; supported: {', '.join(builders)}"
        )
    words = _Words.read(metadata, path)
    try:
        tokenizer, add_bos = builders[model](metadata, words)
    except ValueError:
        raise
    except Exception as error:  # what the Rust library raises has no type of its own
        raise ValueError(f"{path}: corrupt tokenizer: {error}") from error
    _add_tokens(tokenizer, words)
    special = {
        "bos_token": words.special("bos"),
        "eos_token": words.special("eos"),
        "unk_token": words.special("unknown"),
        "pad_token": words.special("padding"),
    }
    add_bos = (
        metadata.get("tokenizer.ggml.add_bos_token", add_bos) and special["bos_token"] is not None
    )
    add_eos = (
        metadata.get("tokenizer.ggml.add_eos_token", False) and special["eos_token"] is not None
    )
    _add_template(
        tokenizer,
        special["bos_token"] if add_bos else None,
        special["eos_token"] if add_eos else None,
    )
    extra: dict[str, Any] = {name: token for name, token in special.items() if token is not None}
    if (template := _chat_template(metadata)) is not None:
        extra["chat_template"] = template
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        add_bos_token=bool(
            add_bos
        ),  # transformers builds the same template again, and shows the flags
        add_eos_token=bool(add_eos),
        **extra,
    )


@dataclass(frozen=True, slots=True)
class _Words:
    """The vocabulary: pieces, their types, and the ids with a role (``bos``, ``unknown``, …)."""

    path: Path
    pieces: list[str]
    types: list[int]
    roles: dict[str, int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any], path: Path) -> _Words:
        pieces = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(pieces, list) or not pieces:
            raise ValueError(
                f"{path}: expected metadata 'tokenizer.ggml.tokens', the file has none"
            )
        types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(pieces)
        if len(types) != len(pieces):
            raise ValueError(
                f"{path}: expected a token type for each of {len(pieces)} tokens, got {len(types)}"
            )
        if len(set(pieces)) != len(pieces):
            twice = next(piece for i, piece in enumerate(pieces) if piece in pieces[:i])
            raise ValueError(f"{path}: expected distinct tokens, got {twice!r} twice")
        roles = {}
        for role in ("bos", "eos", "unknown", "padding"):
            token = metadata.get(f"tokenizer.ggml.{role}_token_id")
            if token is None:
                continue
            if not 0 <= token < len(pieces):
                raise ValueError(
                    f"{path}: {role}_token_id: expected an id below {len(pieces)}, got {token}"
                )
            roles[role] = token
        return cls(path, pieces, types, roles)

    def special(self, role: str) -> str | None:
        return self.pieces[self.roles[role]] if role in self.roles else None


def _byte_level(metadata: Mapping[str, Any], words: _Words) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether it starts texts with bos where the file does not say.

    Bytes that are no words of the vocabulary vanish, as in llama.cpp: SmolLM2 lacks 21, 13 of which
    UTF-8 never uses.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"{words.path}: pre-tokenizer {name!r} is not supported; supported: "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    pre = PRE_TOKENIZERS[name]
    lines = metadata.get("tokenizer.ggml.merges")
    if lines is None:
        raise ValueError(
            f"{words.path}: expected metadata 'tokenizer.ggml.merges', the file has none"
        )
    merges = []
    for line in lines:
        cut = line.find(" ", 1)
        if cut < 0:
            raise ValueError(f"{words.path}: merge: expected two pieces and a space, got {line!r}")
        merges.append((line[:cut], line[cut + 1 :]))
    vocab = {piece: token for token, piece in enumerate(words.pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(metadata: Mapping[str, Any], words: _Words) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE, and True: it starts texts with bos where the file does not say."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(words.pieces):
        got = "none" if scores is None else str(len(scores))
        raise ValueError(
            f"{words.path}: expected a score for each of {len(words.pieces)} tokens, got {got}"
        )
    vocab = {piece: token for token, piece in enumerate(words.pieces)}
    unknown = words.special("unknown")
    if unknown is None and UNKNOWN in words.types:
        unknown = words.pieces[words.types.index(UNKNOWN)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            _merges(words, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=words.types.count(BYTE) == 256,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    )
    decode = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*decode, decoders.Strip(" ", 1, 0)] if prefix else decode
    )
    return tokenizer, True


def _merges(words: _Words, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two, best piece first.

    SentencePiece joins the neighbours whose *result* scores highest, so all splits of a piece rank
    by its score; among themselves by the scores of their parts. Control, byte and user-defined
    pieces are matched whole and take no part.
    """
    score = {
        piece: (-value, token)
        for token, (piece, value, kind) in enumerate(
            zip(words.pieces, scores, words.types, strict=True)
        )
        if kind in (NORMAL, UNUSED)
    }
    ranked = [
        (score[piece], score[piece[:cut]], score[piece[cut:]], piece[:cut], piece[cut:])
        for piece in score
        for cut in range(1, len(piece))
        if piece[:cut] in score and piece[cut:] in score
    ]
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, words: _Words) -> None:
    from tokenizers import AddedToken

    def chosen(*kinds: int) -> list[AddedToken]:
        return [
            AddedToken(piece, normalized=False, special=kinds != (USER_DEFINED,))
            for piece, kind in zip(words.pieces, words.types, strict=True)
            if kind in kinds
        ]

    tokenizer.add_special_tokens(chosen(CONTROL, UNKNOWN))
    tokenizer.add_tokens(chosen(USER_DEFINED))


def _add_template(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    from tokenizers import processors

    def template(sequence: str, type_id: int) -> list[str]:
        return [f"{part}:{type_id}" for part in (bos, sequence, eos) if part is not None]

    tokenizer.post_processor = processors.TemplateProcessing(
        single=template("$A", 0),
        pair=template("$A", 0) + template("$B", 1),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {bos, eos} if token],
    )


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """One template, or one a name where the file has several."""
    default = metadata.get("tokenizer.chat_template")
    names = metadata.get("tokenizer.chat_templates") or []
    named = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    found = {name: text for name, text in {"default": default, **named}.items() if text is not None}
    return found if len(found) > 1 else default

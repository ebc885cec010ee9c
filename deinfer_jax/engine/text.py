"""The text of a continuation, token by token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["TextStream"]

BROKEN = "\ufffd"  # what decoders put for bytes that are no UTF-8
WINDOW, KEPT = 16, 8  # a window of more than WINDOW tokens is cut to KEPT … 2 * KEPT - 1
UNFINISHED = 3  # most tokens, and most U+FFFD, of a character of which bytes are missing

# Up to where a clean-up (" ." to ".", " n't" to "n't", " ' " to "'") has nothing more to change:
# all that it changes begins with a blank, and the longest goes on for three characters. A quote
# may have swallowed the blank behind it.
CLEANED = re.compile(r".*(?:[^ ']{3}|[^ 'n](?= ))", re.DOTALL)


class TextStream:
    """Text of a continuation, as its tokens come.

    It is what decoding prompt and continuation at once has behind the prompt; where that does not
    begin with the decoded prompt, as a character spans the seam, what decoding the continuation
    alone gives. Special tokens are not shown. Only the last tokens are decoded, so that a token
    costs the same wherever it comes.

    In one case decoding at once would take back what has been shown: a byte fallback writes U+FFFD
    for *all* bytes of a run if one of them is broken. Characters shown before that byte stay.

    Of several stop strings the one that is complete first ends the text, however the text is cut
    into tokens; of those complete at the same character, the longest. A stop string that begins in
    the prompt does not count.

    Args:
        tokenizer: of transformers; its own clean-up of blanks, where it has one, applies.
        prompt: token ids of what is continued.
        stop: strings that end the text, none of them empty.

    Attributes:
        found: the stop string that ended the text, else None.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        assert all(stop), f"an empty stop string in {stop!r}"
        self.found: str | None = None
        self._tokenizer, self._prompt = tokenizer, prompt
        self._cleans = _cleans(tokenizer)
        self._stop = tuple(stop)
        self._held = ""  # final, but may become a stop string
        self._pieces: list[str] = []
        self._taken = 0  # pieces
        self._skipped = 0  # characters that ``again`` need not give
        self._finished = False

        # The last tokens, their text, how much of that has been shown (at first the prompt's), and
        # the first token of which something has not.
        self._window = list(prompt)
        self._text = self._shown = self._decode(self._window)
        self._fresh = len(self._window)
        self._shrink()

    @property
    def text(self) -> str:
        """All final text: without what is held back, and cut before the stop string."""
        return "".join(self._pieces)

    def push(self, token: int) -> bool:
        """Adds a token.

        Args:
            token: an id that follows those before; an error once a stop string is complete.

        Returns:
            Whether a stop string is complete.
        """
        assert self.found is None and not self._finished, "the text has ended"
        before = self._text
        self._window.append(token)
        self._text = self._decode(self._window)
        if self._text == before and not self._decode([token, token]):
            # Special, or no token at all. (Once would not tell: "▁" alone decodes to nothing, too.)
            self._window.pop()
            return False
        self._show(final=False)
        if self.found is not None:
            return True
        long = len(self._window) > WINDOW and self._text.startswith(self._shown)
        if long and not self._shrink():
            self._cut()
        return self.found is not None

    def take(self) -> str:
        """Final text that was not taken yet: whole characters, and no beginning of a stop string
        that may still become one."""
        new = "".join(self._pieces[self._taken :])
        self._taken = len(self._pieces)
        known = min(self._skipped, len(new))
        self._skipped -= known
        return new[known:]

    def again(self) -> TextStream:
        """The same from the beginning, for all tokens to be pushed once more; what was taken is not
        given again."""
        fresh = TextStream(self._tokenizer, self._prompt, self._stop)
        fresh._skipped = len("".join(self._pieces[: self._taken])) + self._skipped
        return fresh

    def finish(self) -> None:
        """Makes final what was held back: nothing more comes."""
        if self.found is None and not self._finished:
            self._show(final=True)
            self._release(len(self._held))
        self._finished = True

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _show(self, final: bool) -> None:
        """Shows what no later token can change."""
        end = self._settled(final)
        if not self._text.startswith(self._shown[:end]):
            # New bytes changed the old ones, which stay as they are; the new ones stand alone.
            self._window = self._window[self._fresh :]
            self._text, self._shown, self._fresh = self._decode(self._window), "", 0
            end = self._settled(final)
        if end > len(self._shown):
            new, self._shown = self._text[len(self._shown) : end], self._text[:end]
            self._add(new)
        if end == len(self._text):
            self._fresh = len(self._window)

    def _settled(self, final: bool) -> int:
        """Characters of the window's text that no later token can change."""
        length = len(self._text)
        if final:
            return length
        end = max(len(self._text.rstrip(BROKEN)), length - UNFINISHED)
        if self._cleans:
            cleaned = CLEANED.match(self._text, 0, end)
            return cleaned.end() if cleaned else 0
        return end

    def _shrink(self) -> bool:
        """Drops the window's first tokens if the others have the same text without them.

        They have not if the cut goes through a character, or behind the broken byte for which a
        whole run shows as broken.
        """
        unshown = len(self._text) - len(self._shown)
        for size in range(KEPT, 2 * KEPT):
            text = self._decode(self._window[-size:])
            # Some of it has to be old: a decoder may drop the blank at its beginning.
            same = len(text) >= max(unshown, 1) and self._text.endswith(text)
            if same and not self._only_unfinished(size):
                self._fresh = max(0, self._fresh - max(0, len(self._window) - size))
                self._window = self._window[-size:]
                self._text, self._shown = text, text[: len(text) - unshown]
                return True
        return False

    def _only_unfinished(self, size: int) -> bool:
        """Whether the last ``size`` tokens, part of a broken run, would show as broken only as long
        as their last character is unfinished."""
        return self._text.endswith(BROKEN * (UNFINISHED + 1)) and not all(
            self._decode(self._window[:-part]).endswith(self._decode(self._window[-size:-part]))
            for part in range(1, UNFINISHED + 1)
        )

    def _cut(self) -> None:
        """Shows everything and goes on behind it: a run of bytes, broken before the last KEPT of
        them, which are not; or many blanks that a clean-up may change."""
        self._show(final=True)
        self._window = self._window[-KEPT:]
        self._text = self._shown = self._decode(self._window)
        self._fresh = len(self._window)

    def _add(self, new: str) -> None:
        """Looks for stop strings in ``new`` and what was held, and holds what may become one."""
        self._held += new
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := self._held.find(stop)) >= 0
        ]
        if ends:
            _, start, self.found = min(ends)
            self._release(start)
            self._held = ""
            return
        longest = max(map(len, self._stop), default=0)
        held = next(
            (
                size
                for size in range(min(longest, len(self._held)), 0, -1)
                if any(stop.startswith(self._held[-size:]) for stop in self._stop)
            ),
            0,
        )
        self._release(len(self._held) - held)

    def _release(self, size: int) -> None:
        """Makes ``size`` held characters final."""
        if size:
            self._pieces.append(self._held[:size])
            self._held = self._held[size:]


def _cleans(tokenizer: Any) -> bool:
    """Whether decoding cleans blanks up; transformers does not for BPE unless it is told twice."""
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return (
        not bpe or tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    )

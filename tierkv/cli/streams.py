"""What ``generate(streamer=...)`` feeds: tokens with the time each came, and their text as soon as it is certain."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tierkv.cli.process import stop_if_told

if TYPE_CHECKING:
    import torch


class TokenStream:
    """A streamer that notes every new token of a single sequence and when it came.

    Attributes:
        tokens: the new token ids.
        times: seconds on a monotonic clock, one for each token.
    """

    def __init__(self, on_token: Callable[[int], None] | None = None) -> None:
        """Call ``on_token`` for every token."""
        self.began = time.perf_counter()
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._on_token = on_token
        self._prompt_seen = False

    def put(self, value: "torch.Tensor") -> None:
        """Take the prompt, which comes first, or the tokens of a step."""
        stop_if_told()
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        now = time.perf_counter()
        for token in value.flatten().tolist():
            self.tokens.append(token)
            self.times.append(now)
            if self._on_token is not None:
                self._on_token(token)

    def end(self) -> None:
        """Do nothing: the tokens are all here."""

    @property
    def prefill_seconds(self) -> float:
        """Time until the first token, which the prompt takes."""
        return self.times[0] - self.began if self.times else 0.0

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Speed of the tokens after the first; None where there are none."""
        if len(self.times) < 2 or self.times[-1] <= self.times[0]:
            return None
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


class TextStream:
    """Turns tokens into text piece by piece; the pieces together are the text of all tokens.

    A token may end in the middle of a letter or change how its neighbours are spaced. So each piece is the difference
    between two decodings that begin a few tokens back, and text that ends in half a letter is held back.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Decode with ``tokenizer``, special tokens left out."""
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0  # where the decodings begin
        self._written = 0  # tokens whose text was handed out

    def push(self, token: int) -> str:
        """Return the text that became certain with this token; often empty."""
        self._tokens.append(token)
        piece = self._new_text()
        if piece.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context, self._written = self._written, len(self._tokens)
        return piece

    def rest(self) -> str:
        """Return what was held back, at the end."""
        piece = self._new_text()
        self._written = len(self._tokens)
        return piece

    def _new_text(self) -> str:
        known = self._decode(self._tokens[self._context : self._written])
        return self._decode(self._tokens[self._context :])[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        return decode(self._tokenizer, tokens)


def decode(tokenizer: Any, tokens: list[int]) -> str:
    """Return the text of new tokens, without special ones and exactly as they were made."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

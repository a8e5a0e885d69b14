"""Tokens with their times, and text that never shows half a letter."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.commands import byte_tokenizer
from tierkv.cli.streams import TextStream, TokenStream, decode

TOKENIZER = byte_tokenizer()


@given(st.text(max_size=40))
def test_the_pieces_are_the_text(text):
    stream = TextStream(TOKENIZER)
    pieces = [stream.push(token) for token in TOKENIZER(text)["input_ids"]]
    assert "".join([*pieces, stream.rest()]) == text
    assert stream.rest() == ""


@given(st.lists(st.integers(0, 256), max_size=40))
def test_any_tokens_come_to_their_decoded_text(tokens):
    stream = TextStream(TOKENIZER)
    pieces = [stream.push(token) for token in tokens]
    assert "".join([*pieces, stream.rest()]) == decode(TOKENIZER, tokens)


def test_half_a_letter_is_held_back():
    stream = TextStream(TOKENIZER)
    first, second = TOKENIZER("é")["input_ids"]
    assert stream.push(first) == ""
    assert stream.push(second) == "é"


def test_tokens_are_timed_and_the_prompt_is_not_one():
    seen: list[int] = []
    stream = TokenStream(seen.append)
    assert stream.decode_tokens_per_second is None
    assert stream.prefill_seconds == 0
    stream.put(torch.tensor([[1, 2, 3]]))
    stream.put(torch.tensor([7]))
    assert stream.decode_tokens_per_second is None
    stream.put(torch.tensor([8]))
    stream.end()
    assert stream.tokens == seen == [7, 8]
    assert stream.times == sorted(stream.times)
    assert stream.prefill_seconds > 0
    assert stream.decode_tokens_per_second != 0

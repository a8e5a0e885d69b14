"""The demo's prompt: a question about a long real document, the Python reference that comes with Python."""

from collections.abc import Sequence
from typing import Any, Final

from tierkv.cli.console import BadInput
from tierkv.cli.prompts import encode_prompt

QUESTION: Final = 'What is the "with" statement used for, and what does a context manager do?'

# The pages that answer the question come last. A shorter prompt leaves out paragraphs from the front.
TOPICS: Final = (
    "strings", "comparisons", "assignment", "attribute-access", "naming", "execmodel", "import", "calls", "function",
    "class", "for", "raise", "try", "exceptions", "objects", "context-managers", "with",
)  # fmt: skip


def demo_inputs(tokenizer: Any, prompt_tokens: int) -> dict[str, Any]:
    """Return ``input_ids`` and ``attention_mask`` of a prompt of at most, and nearly, ``prompt_tokens`` tokens.

    Raises:
        BadInput: this Python came without its documentation, or the question alone is longer than that.
    """
    paragraphs = document()
    # The template and the question take some tokens, and paragraphs share some: measure, and halve the interval.
    shortest, longest = 0, len(paragraphs)
    while shortest < longest:
        middle = (shortest + longest + 1) // 2
        if _encode(tokenizer, paragraphs[-middle:])["input_ids"].shape[1] <= prompt_tokens:
            shortest = middle
        else:
            longest = middle - 1
    if not shortest:
        raise BadInput(f"a prompt of {prompt_tokens} tokens has no room for the question and a paragraph of text")
    return _encode(tokenizer, paragraphs[-shortest:])


def document() -> list[str]:
    """Return the paragraphs of the document.

    Raises:
        BadInput: this Python came without its documentation.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise BadInput(
            "the demo reads Python's own documentation (pydoc_data.topics), and this Python came without it; "
            "install the full standard library"
        ) from None
    texts = (topics[name] for name in TOPICS if name in topics)
    return [paragraph for text in texts for paragraph in text.strip("\n").split("\n\n") if paragraph.strip()]


def _encode(tokenizer: Any, paragraphs: Sequence[str]) -> dict[str, Any]:
    text = "\n\n".join(paragraphs)
    return encode_prompt(tokenizer, f"Here is a part of the Python documentation:\n\n{text}\n\n{QUESTION}")

"""The demo's prompt: a question about a long real document, the Python reference that comes with Python."""

from collections.abc import Sequence
from typing import Any, Final

from tierkv.cli.console import BadInput
from tierkv.cli.prompts import encode_prompt

QUESTION: Final = 'Question: What is the "with" statement used for, and what does a context manager do?'

# The pages that answer the question come last. A shorter prompt leaves out lines from the front.
TOPICS: Final = (
    "strings", "comparisons", "assignment", "attribute-access", "naming", "execmodel", "import", "calls", "function",
    "class", "for", "raise", "try", "exceptions", "objects", "context-managers", "with",
)  # fmt: skip


def demo_inputs(tokenizer: Any, prompt_tokens: int) -> dict[str, Any]:
    """Return ``input_ids`` and ``attention_mask`` of a prompt of at most, and nearly, ``prompt_tokens`` tokens.

    Raises:
        BadInput: this Python came without its documentation, or the question alone is longer than that.
    """
    lines = document()
    # The template and the question take some tokens, and lines share some: measure, and halve the interval.
    shortest, longest = 0, len(lines)
    while shortest < longest:
        middle = (shortest + longest + 1) // 2
        if _encode(tokenizer, lines[-middle:])["input_ids"].shape[1] <= prompt_tokens:
            shortest = middle
        else:
            longest = middle - 1
    if not shortest:
        raise BadInput(f"a prompt of {prompt_tokens} tokens has no room for the question and a line of text")
    return _encode(tokenizer, lines[-shortest:])


def document() -> list[str]:
    """Return the lines of the document.

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
    return "\n\n".join(topics[name].strip("\n") for name in TOPICS if name in topics).splitlines()


def _encode(tokenizer: Any, lines: Sequence[str]) -> dict[str, Any]:
    text = "\n".join(lines).strip("\n")
    return encode_prompt(tokenizer, f"Here is a part of the Python documentation:\n\n{text}\n\n{QUESTION}")

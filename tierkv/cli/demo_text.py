"""The demo's prompt: a question about a long real document, the Python reference that comes with Python."""

from collections.abc import Sequence
from typing import Any, Final

from tierkv.cli.console import BadInput
from tierkv.cli.prompts import encode_prompt

QUESTION: Final = 'Question: What is the "with" statement used for, and what does a context manager do?'

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
    costs = [len(tokenizer(paragraph + "\n\n", add_special_tokens=False)["input_ids"]) for paragraph in paragraphs]
    kept, tokens = len(paragraphs), 0
    while kept and tokens + costs[kept - 1] <= prompt_tokens:
        kept -= 1
        tokens += costs[kept]
    # The template and the question take some, and tokens merge across paragraphs: measure, and drop what is too much.
    while kept < len(paragraphs):
        inputs = encode_prompt(tokenizer, _prompt(paragraphs[kept:]))
        if inputs["input_ids"].shape[1] <= prompt_tokens:
            return inputs
        kept += 1
    raise BadInput(f"a prompt of {prompt_tokens} tokens has no room for the question and a paragraph of text")


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
    return [
        paragraph.strip("\n")
        for name in TOPICS
        for paragraph in topics.get(name, "").split("\n\n")
        if paragraph.strip()
    ]


def _prompt(paragraphs: Sequence[str]) -> str:
    text = "\n\n".join(paragraphs)
    return f"Here is a part of the Python documentation:\n\n{text}\n\n{QUESTION}"

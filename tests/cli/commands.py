"""What the command-line tests run and look at: a tiny model in a folder, processes, and what they leave behind."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
LIMIT = 8192


def byte_tokenizer(chat_template: str | None = CHAT) -> tf.PreTrainedTokenizerFast:
    """Make a tokenizer in which every byte is a token; token 256 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = chat_template
    return fast


def save_tiny_model(folder: Path, chat_template: str | None = CHAT) -> Path:
    """Save a random Llama whose KV has many thin layers, so that small budgets still hold several blocks."""
    torch.manual_seed(3)
    config = tf.LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LIMIT, bos_token_id=None, eos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config)
    # Tokens 0 to 93 are the visible letters of ASCII: only these are made, so that there is text to see and no end.
    model.lm_head.weight.data[94:] = 0
    model.generation_config = tf.GenerationConfig(pad_token_id=256, eos_token_id=256)
    model.save_pretrained(folder)
    byte_tokenizer(chat_template).save_pretrained(folder)
    return folder


def finish(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str, str]:
    """Wait for a process; return its exit code, stdout and stderr."""
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, stdout, stderr


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Wait until something holds while a process runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"the process ended early: {process.communicate()}"
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def stop(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str, str]:
    """Send a signal and wait for the end."""
    process.send_signal(number)
    return finish(process)


def spill_files(store: Path) -> list[Path]:
    """List what engines left in the store: their directories, locks and files."""
    return sorted((store / "spill").rglob("*"))


def spilled_bytes(store: Path) -> int:
    """Return the bytes that engines wrote to the store, as the file system counts them."""
    total = 0
    for file in spill_files(store):
        with suppress(OSError):  # an engine may be closing
            total += file.stat().st_blocks * 512
    return total


def assert_one_line_error(result: Any, *words: str) -> None:
    """Check bad input: exit code 2, nothing on stdout, and one line that begins with ``error:`` and says the words."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


def one_object(stdout: str) -> dict[str, Any]:
    """Parse stdout, which must be exactly one JSON object."""
    parsed = json.loads(stdout)
    assert isinstance(parsed, dict)
    return parsed

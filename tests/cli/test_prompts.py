"""Prompts: one source, checked before a model is loaded; and a length that fits the model."""

from types import SimpleNamespace

import pytest
import torch

from tests.cli.commands import assert_one_line_error, byte_tokenizer
from tierkv.cli.console import BadInput
from tierkv.cli.prompts import check_length, check_tokens, encode_prompt, read_prompt

NO_MODEL = ("generate", "--model", "/no/such/model")


@pytest.mark.parametrize(
    "sources",
    [
        [],
        ["--prompt", "a", "--prompt-file", "b"],
        ["--prompt", "a", "-"],
        ["--prompt-file", "b", "-"],
        ["--prompt-file", "-", "-"],
    ],
)
def test_exactly_one_source(cli, sources):
    assert_one_line_error(cli(*NO_MODEL, *sources), "--prompt TEXT", "--prompt-file")


def test_a_stray_argument_is_not_taken_for_a_prompt(cli):
    assert_one_line_error(cli(*NO_MODEL, "hello"), "hello", "--prompt TEXT")


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_empty_prompts(cli, tmp_path, text):
    file = tmp_path / "prompt.txt"
    file.write_text(text)
    assert_one_line_error(cli(*NO_MODEL, "--prompt", text), "--prompt", "empty")
    assert_one_line_error(cli(*NO_MODEL, "--prompt-file", file), "prompt.txt", "empty")
    assert_one_line_error(cli(*NO_MODEL, "-", input=text), "standard input", "empty")


def test_files_that_are_not_text(cli, tmp_path):
    assert_one_line_error(cli(*NO_MODEL, "--prompt-file", tmp_path / "none"), "none", "no such file")
    assert_one_line_error(cli(*NO_MODEL, "--prompt-file", tmp_path), "directory")
    assert_one_line_error(cli(*NO_MODEL, "--prompt-file", "~nobody-here/x"), "cannot be read")
    latin, binary = tmp_path / "latin.txt", tmp_path / "binary"
    latin.write_bytes("déjà".encode("latin-1"))
    binary.write_bytes(b"GGUF\x00\x01")
    assert_one_line_error(cli(*NO_MODEL, "--prompt-file", latin), "latin.txt", "not UTF-8", "byte 1")
    assert_one_line_error(cli(*NO_MODEL, "--prompt-file", binary), "binary", "not a text file")
    assert_one_line_error(cli(*NO_MODEL, "-", input=latin.read_bytes()), "standard input", "not UTF-8")
    assert_one_line_error(cli(*NO_MODEL, "--prompt", "a\udcff"), "not UTF-8")


def test_a_file_without_a_name_and_one_without_an_end(cli):
    assert_one_line_error(cli(*NO_MODEL, "--prompt-file", ""), "--prompt-file has no name")
    assert_one_line_error(cli(*NO_MODEL, "--prompt-file", "/dev/zero"), "/dev/zero", "more than 64 MiB")


def test_tokens_that_the_model_does_not_know():
    check_tokens(torch.tensor([[3, 7]]), torch.nn.Embedding(8, 2))
    with pytest.raises(BadInput, match="token 7 of the prompt, and the model knows tokens 0 to 6; get tokenizer and"):
        check_tokens(torch.tensor([[3, 7]]), torch.nn.Embedding(7, 2))


def test_a_file_is_read_whole_without_its_byte_order_mark(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes("\ufeffüber\n".encode())
    assert read_prompt(None, str(file), None) == "über\n"


def test_the_chat_template_is_used_unless_raw():
    tokenizer = byte_tokenizer()

    def text(**options):
        return tokenizer.decode(encode_prompt(tokenizer, "hi", **options)["input_ids"][0])

    assert text() == "[user] hi\n[assistant] "
    assert text(system="be brief") == "[system] be brief\n[user] hi\n[assistant] "
    assert text(raw=True) == "hi"


def test_a_model_without_a_template():
    tokenizer = byte_tokenizer(chat_template=None)
    assert encode_prompt(tokenizer, "hi")["input_ids"].shape == (1, 2)
    with pytest.raises(BadInput, match="chat template"):
        encode_prompt(tokenizer, "hi", system="x")


def test_a_template_that_refuses():
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    tokenizer = byte_tokenizer(refusing)
    assert encode_prompt(tokenizer, "hi")["input_ids"].shape == (1, 1)
    with pytest.raises(BadInput, match="no system role"):
        encode_prompt(tokenizer, "hi", system="x")
    with pytest.raises(BadInput, match="--raw"):
        encode_prompt(byte_tokenizer("{% broken"), "hi")


def model_config(limit):
    return SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(max_position_embeddings=limit))


def test_what_fits_is_made_by_default():
    assert check_length(model_config(100), 40, None, 256) == 60
    assert check_length(model_config(1000), 40, None, 256) == 256
    assert check_length(model_config(100), 40, 60, 256) == 60
    assert check_length(model_config(None), 40, None, 256) == 256
    assert check_length(model_config(None), 10**6, 7, 256) == 7


def test_what_does_not_fit_says_what_would():
    with pytest.raises(
        BadInput, match=r"1,000 tokens and the model's limit is 100 .* shorten it to 99 tokens, about 9%"
    ):
        check_length(model_config(100), 1000, None, 256)
    with pytest.raises(BadInput, match=r"room for 60 new .* --max-new-tokens 60, or a prompt of at most 39 tokens"):
        check_length(model_config(100), 40, 61, 256)
    with pytest.raises(BadInput, match=r"--max-new-tokens 60$"):
        check_length(model_config(100), 40, 100, 256)

"""``tierkv generate`` on a tiny model: the same tokens as transformers alone, through three tiers, and what it refuses."""

import shutil
import signal

import pytest
import safetensors.torch
import transformers as tf

from tests.cli.commands import (
    LIMIT,
    assert_one_line_error,
    finish,
    one_object,
    save_tiny_model,
    spill_files,
    spilled_bytes,
    stop,
    wait_for,
)
from tierkv.cli.console import BadInput
from tierkv.cli.generate import sampling_arguments

SMALL_TIERS = "block_size = 16\n[device]\ncapacity = 400_000\n[host]\ncapacity = 200_000\n[disk]\ncapacity = '64MiB'\n"


@pytest.fixture
def small_tiers(tmp_path):
    file = tmp_path / "tierkv.toml"
    file.write_text(SMALL_TIERS)
    return file


def reference(folder, prompt, new_tokens):
    """Generate with transformers alone."""
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(f"[user] {prompt}\n[assistant] ", return_tensors="pt", return_token_type_ids=False)
    length = inputs["input_ids"].shape[1]
    return length, model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[0, length:].tolist()


def test_json_has_the_tokens_of_transformers_alone_through_three_tiers(cli, tiny, small_tiers, clean_environment):
    prompt = "word " * 90
    file = clean_environment.parent / "prompt.txt"
    file.write_text(prompt)
    length, tokens = reference(tiny, prompt, 40)
    result = cli(
        "generate", "--model", tiny, "--prompt-file", file, "--max-new-tokens", 40, "--config", small_tiers, "--json"
    )
    answer = one_object(result.stdout)
    assert answer["tokens"] == tokens
    assert (answer["prompt_tokens"], answer["new_tokens"]) == (length, len(tokens))
    assert answer["finish_reason"] == "length"
    assert answer["dtype"] == "float32"
    assert all(tier["blocks"] > 0 for tier in answer["stats"]["tiers"].values())
    assert spill_files(clean_environment) == []


def test_text_is_streamed_and_stats_go_to_stderr(cli, tiny):
    plain = cli("generate", "--model", tiny, "--prompt", "a", "--max-new-tokens", 12, "--stats")
    answer = one_object(cli("generate", "--model", tiny, "-", "--max-new-tokens", 12, "--json", input="a").stdout)
    assert plain.exit_code == 0
    assert plain.stdout == answer["text"] + "\n"
    for word in ("budget", "device", "tokens/s", "read path"):
        assert word in plain.stderr


def test_the_same_prompt_from_every_source(cli, tiny, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("hello")
    command = ("generate", "--model", tiny, "--max-new-tokens", 4, "--json")
    given = [["--prompt", "hello"], ["--prompt-file", file], ["--prompt-file", "-"], ["--prompt", "-"], ["-"]]
    answers = [one_object(cli(*command, *source, input="hello").stdout) for source in given]
    assert [answer["tokens"] for answer in answers] == [answers[0]["tokens"]] * len(given)
    assert answers[0]["prompt_tokens"] == len("[user] hello\n[assistant] ")
    assert one_object(cli(*command, "--prompt", "hello", "--raw").stdout)["prompt_tokens"] == len("hello")
    systematic = one_object(cli(*command, "--prompt", "hello", "--system", "x").stdout)
    assert systematic["prompt_tokens"] == len("[system] x\n[user] hello\n[assistant] ")


def test_a_seed_makes_sampling_repeatable(cli, tiny):
    def tokens(*options):
        command = ("generate", "--model", tiny, "--prompt", "a", "--max-new-tokens", 8, "--json")
        return one_object(cli(*command, *options).stdout)["tokens"]

    hot = ("--temperature", 1.5, "--top-k", 50, "--top-p", 0.95, "--seed")
    assert tokens(*hot, 1) == tokens(*hot, 1)
    assert tokens(*hot, 1) != tokens(*hot, 2)
    assert tokens("--temperature", 0) == tokens()


def test_options_that_contradict_each_other(cli):
    command = ("generate", "--model", "/no/such/model", "--prompt", "a")
    assert_one_line_error(cli(*command, "--temperature", 0, "--top-p", 0.5), "--temperature 0", "--top-p")
    assert_one_line_error(cli(*command, "--seed", 3), "--seed", "--temperature")
    assert_one_line_error(cli(*command, "--top-p", 0), "--top-p 0")
    assert_one_line_error(cli(*command, "--raw", "--system", "x"), "--raw", "--system")
    for temperature in ("1e-44", "inf", "1e9"):
        assert_one_line_error(cli(*command, "--temperature", temperature), "--temperature", "legal", "0.000001")
    for option in (("--max-new-tokens", 0), ("--top-k", 1.5), ("--seed", 2**64), ("--temperature", "hot")):
        assert_one_line_error(cli(*command, *option), option[0])
    assert_one_line_error(cli(*command, "--config", ""), "has no name")
    assert_one_line_error(cli(*command, "--config", "/none.toml"), "/none.toml")
    assert_one_line_error(cli(*command), "/no/such/model", "legal")


def test_greedy_ignores_what_the_model_says_about_sampling():
    assert sampling_arguments(None, None, None, None)["do_sample"] is False
    assert sampling_arguments(0.5, None, None, 1) == {"do_sample": True, "num_beams": 1, "temperature": 0.5}
    with pytest.raises(BadInput, match="--top-k"):
        sampling_arguments(0, None, 5, None)


def test_a_prompt_that_is_too_long_says_what_fits(cli, tiny, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("a" * LIMIT)
    command = ("generate", "--model", tiny, "--prompt-file", file)
    result = cli(*command)
    assert result.exit_code == 2
    assert f"the model's limit is {LIMIT:,}" in result.stderr
    file.write_text("a" * (LIMIT - 100))
    assert "--max-new-tokens 80" in cli(*command, "--max-new-tokens", 500).stderr


def test_a_model_that_gives_no_numbers(cli, tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "nan")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    result = cli("generate", "--model", folder, "--prompt", "a", "--top-k", 5)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: the model's scores are not numbers in float32; try")


def test_a_tokenizer_of_another_model(cli, tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "other")
    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(50)
    model.config.pad_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder)
    result = cli("generate", "--model", folder, "--prompt", "zzz")
    assert result.exit_code == 2
    assert "get tokenizer and weights of the same model" in result.stderr.splitlines()[-1]


def test_a_budget_that_is_too_small_names_one_that_suffices(cli, tiny, tmp_path):
    file = tmp_path / "tierkv.toml"
    file.write_text("block_size = 16\n[device]\ncapacity = 400_000\n[disk]\ncapacity = 0\n")
    result = cli("generate", "--model", tiny, "--prompt", "a" * 2000, "--config", file)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "device.capacity" in result.stderr.splitlines()[-1]


def test_a_model_without_a_chat_template(cli, tmp_path):
    folder = save_tiny_model(tmp_path / "plain", chat_template=None)
    answer = one_object(cli("generate", "--model", folder, "--prompt", "hello", "--max-new-tokens", 2, "--json").stdout)
    assert answer["prompt_tokens"] == len("hello")
    refused = cli("generate", "--model", folder, "--prompt", "hello", "--system", "x")
    assert refused.exit_code == 2
    assert "--system" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "line"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_an_interrupt_cleans_up(start, tiny, small_tiers, clean_environment, number, code, line):
    small_tiers.write_text("[device]\ncapacity = 3_000_000\n[host]\ncapacity = 400_000\n[disk]\ncapacity = '64MiB'\n")
    process = start(
        "generate", "--model", tiny, "--prompt", "a" * 3000, "--max-new-tokens", 4000, "--config", small_tiers, "--json"
    )
    wait_for(lambda: spilled_bytes(clean_environment) > 1_000_000, process)
    returned, stdout, stderr = stop(process, getattr(signal, number))
    assert (returned, stdout) == (code, "")
    assert stderr.splitlines()[-1] == line
    assert "Traceback" not in stderr
    assert spill_files(clean_environment) == []


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_run(start, tiny, clean_environment):
    process = start("generate", "--model", tiny, "--prompt", "a", "--max-new-tokens", 5000)
    process.stdout.close()
    process.stdout = None
    code, _, stderr = finish(process)
    assert code == 1, stderr
    assert "Traceback" not in stderr
    assert "Broken" not in stderr
    assert spill_files(clean_environment) == []


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_from_a_gguf_file(cli):
    answer = one_object(
        cli(
            "generate",
            "--model",
            "smollm2",
            "--prompt",
            "What is the capital of France?",
            "--max-new-tokens",
            32,
            "--json",
        ).stdout
    )
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "stop"

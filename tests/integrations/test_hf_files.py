"""What is wrong with a model's folder: one line that names the file and says what to do."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import transformers as tf

from tests.cli.commands import save_tiny_model
from tierkv.errors import ConfigError, UnsupportedModel
from tierkv.integrations.hf_load import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def broken(folder, tmp_path):
    """Give a copy of the model's folder to break."""
    return Path(shutil.copytree(folder, tmp_path / "broken"))


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


def put(name, content):
    """Return a way to break a folder: other content for one file."""
    return lambda folder: (folder / name).write_bytes(content)


def keep(share):
    """Return a way to break a folder: only the first part of its weights."""
    return lambda folder: os.truncate(folder / "model.safetensors", int(share * 1_000_000))


def say(**settings):
    """Return a way to break a folder: other settings in its config.json, or none where they are None."""

    def change(folder):
        config = json.loads((folder / "config.json").read_text()) | settings
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))

    return change


def without(*patterns):
    """Return a way to break a folder: files that are missing."""
    return lambda folder: [file.unlink() for pattern in patterns for file in folder.glob(pattern)]


def drop_weights(folder):
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def drop_a_shard(folder):
    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="500KB")
    (folder / "model-00002-of-00003.safetensors").unlink()


def rename_weights(folder):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


@pytest.mark.parametrize(
    ("damage", "name", "words"),
    [
        (without("tokenizer*"), "", "has no tokenizer.json"),
        (put("tokenizer.json", b""), "/tokenizer.json", "is empty"),
        (put("tokenizer.json", b"[]"), "/tokenizer.json", "not a JSON object"),
        (put("tokenizer_config.json", b"{oops"), "/tokenizer_config.json", "not JSON at line 1, column 2"),
        (put("config.json", b"{ not json"), "/config.json", "not JSON at line 1, column 3"),
        (put("config.json", b""), "/config.json", "is empty"),
        (put("config.json", b"[]"), "/config.json", "not a JSON object"),
        (put("config.json", b"\xff\xfe{"), "/config.json", "not JSON in UTF-8"),
        (put("config.json", b"{}"), "/config.json", "no model_type"),
        (put("generation_config.json", b"[]"), "/generation_config.json", "not a JSON object"),
        (say(model_type="from_the_future"), "/config.json", 'does not know the model_type "from_the_future"'),
        (say(model_type=None), "/config.json", "no model_type"),
        (say(hidden_size=128), "", "and 74 more, [257, 64] in the files and [257, 128] by config.json"),
        (say(hidden_size=65), "/config.json", "hidden size (65) is not a multiple"),
        (say(hidden_size="64"), "/config.json", "expected int, got str"),
        (say(num_attention_heads=0), "", "compare config.json"),
        (say(pad_token_id=999), "", "Padding_idx must be within"),
        (say(rope_scaling={"type": "odd"}), "", "KeyError: 'odd'"),
        (say(num_hidden_layers=9), "", "missing: model.layers.8.input_layernorm.weight and 8 more"),
        (drop_weights, "", "missing: model.layers.3.mlp.up_proj.weight; get the whole model"),
        (keep(0.5), "/model.safetensors", "damaged or cut off"),
        (keep(0), "/model.safetensors", "is empty"),
        (put("model.safetensors", b"<!DOCTYPE html>"), "/model.safetensors", "damaged"),
        (put("model.safetensors", b"version https://git-lfs.github.com/spec/v1"), "/model.safetensors", "git lfs pull"),
        (drop_a_shard, "/model-00002-of-00003.safetensors", "is missing"),
        (rename_weights, "", "not named model.safetensors but weights.safetensors"),
    ],
)
def test_a_damaged_folder_is_one_line_that_names_the_file_and_what_to_do(broken, damage, name, words):
    damage(broken)
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        load_model(broken)
    line = one_line(error)
    assert line.startswith(f"{broken}{name}: ")
    assert re.search(r"; (get|copy|compare|correct|rename|run) ", line)
    assert "..." not in line.replace("{...}", ""), "nothing is cut off"


def test_an_index_of_weights_that_is_none(broken):
    (broken / "model.safetensors").rename(broken / "model-00001-of-00001.safetensors")
    (broken / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"index\.json: it has no weight_map"):
        load_model(broken)


def test_weights_that_are_left_out_are_said(broken, caplog):
    say(num_hidden_layers=7)(broken)
    load_model(broken)
    assert "left out: model.layers.7.input_layernorm.weight and 8 more" in caplog.text


def test_models_that_are_not_decoders(broken):
    tf.T5Config().save_pretrained(broken)
    with pytest.raises(UnsupportedModel, match="not a decoder-only language model") as error:
        load_model(broken)
    one_line(error)


def test_code_beside_a_model_is_never_run(broken):
    config = json.loads((broken / "config.json").read_text())
    config |= {"model_type": "odd", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ConfigError, match="code beside a model is never run") as error:
        load_model(broken)
    one_line(error)

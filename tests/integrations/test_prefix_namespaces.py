"""What decides KV besides the ids splits the store; what only changes rounding does not. A doubt is a miss."""

import json

import pytest
import torch
import transformers as tf

import tierkv
from tests.integrations.conftest import COMMON, build
from tests.integrations.prefixes import GREEDY, first_forward, roomy
from tierkv.integrations.hf_weights import ModelWeights
from tierkv.keys import chain_keys, namespace_digest


@pytest.fixture
def model():
    """One that a test may change."""
    return build("llama", "sdpa", torch.float32)


def digest_of(model, path, block_size=16, **prefix):
    settings = roomy(path, persist=True, **prefix) | {"block_size": block_size}
    with tierkv.attach(model, settings) as engine:
        return engine._prefixes._namespace_of(engine.weights.stamp())


class Adapted(torch.nn.Module):
    """What PEFT puts in the place of a layer, as far as it matters here."""

    def __init__(self, inner, name="english"):
        super().__init__()
        self.base_layer = inner
        self.active_adapters, self.merged_adapters, self.disable_adapters = [name], [], False
        self.scaling = {name: 2.0}
        self.lora_a = torch.nn.ModuleDict({name: torch.nn.Linear(inner.in_features, 2, bias=False)})
        self.lora_b = torch.nn.ModuleDict({name: torch.nn.Linear(2, inner.out_features, bias=False)})

    def forward(self, hidden):
        out = self.base_layer(hidden)
        for name in [] if self.disable_adapters else self.active_adapters:
            out = out + self.lora_b[name](self.lora_a[name](hidden)) * self.scaling[name]
        return out


def retrain(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)


def retrain_behind_autograd(model):
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1.01)


def replace(model):
    model.model.layers[0].self_attn.k_proj = torch.nn.Linear(64, 32, bias=False)


def adapt(model):
    torch.manual_seed(1)
    model.model.layers[0].self_attn.v_proj = Adapted(model.model.layers[0].self_attn.v_proj).requires_grad_(False)


def change_a_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(0.9)


@pytest.mark.parametrize("change", [retrain, retrain_behind_autograd, replace, adapt, change_a_buffer])
def test_other_weights_are_another_model(lab, model, tmp_path, change):
    """While tierkv is attached, in memory; and after a restart, on disk."""
    batch = lab.prompt(tokens=101)
    with tierkv.attach(model, roomy(tmp_path, persist=True)):
        first_forward(model, batch)
        assert first_forward(model, batch)[1] == 5
        before = ModelWeights(model).fingerprint()
        change(model)
        assert ModelWeights(model).fingerprint() != before
        out, computed = first_forward(model, batch)
        assert computed == 101
        assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
    with tierkv.attach(model, roomy(tmp_path, persist=True)):
        out, computed = first_forward(model, batch)
        assert computed == 5
        assert torch.equal(out, lab.stock(model, **batch, **GREEDY))


def test_another_adapter_is_another_model(lab, model, tmp_path):
    adapt(model)
    layer = model.model.layers[0].self_attn.v_proj
    batch = lab.prompt(tokens=101)
    states = [(True, 2.0, ["english"]), (False, 3.0, ["english"]), (False, 3.0, [])]
    with tierkv.attach(model, roomy(tmp_path, persist=True)):
        first_forward(model, batch)
        for layer.disable_adapters, layer.scaling["english"], layer.active_adapters in states:
            out, _ = first_forward(model, batch)
            assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
        layer.active_adapters, layer.scaling["english"] = ["english"], 2.0  # as it was: found again
        assert first_forward(model, batch)[1] == 5


def test_a_renamed_adapter_is_another_one(model):
    linear = model.model.layers[0].self_attn.v_proj
    found = set()
    for name in ("english", "french"):
        torch.manual_seed(1)
        model.model.layers[0].self_attn.v_proj = Adapted(linear, name)
        found.add(ModelWeights(model).fingerprint())
    assert len(found) == 2


def test_what_splits_the_store(model, tmp_path):
    config = model.config.to_dict()
    scaled = dict(COMMON, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})

    def variant(**changes):
        other = tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**(scaled if changes.pop("rope", 0) else COMMON)))
        other.load_state_dict(model.state_dict())
        for name, value in changes.items():
            setattr(other.config, name, value)
        return other.eval()

    assert config["model_type"] == "llama"
    found = {
        "as it is": digest_of(model, tmp_path),
        "dtype": digest_of(build("llama", "sdpa", torch.bfloat16), tmp_path),
        "float16": digest_of(build("llama", "sdpa", torch.float16), tmp_path),
        "block size": digest_of(model, tmp_path, block_size=32),
        "salt": digest_of(model, tmp_path, salt="tenant a"),
        "another salt": digest_of(model, tmp_path, salt="tenant b"),
        "rope": digest_of(variant(rope=1), tmp_path),
        "epsilon": digest_of(variant(rms_norm_eps=1e-3), tmp_path),
        "weights": digest_of(build("llama", "sdpa", torch.float32, seed=8), tmp_path),
        "family": digest_of(build("qwen3", "sdpa", torch.float32), tmp_path),
    }
    assert len(set(found.values())) == len(found)


def test_what_does_not_split_the_store(model, tmp_path):
    before = digest_of(model, tmp_path)
    model.config.use_cache = not model.config.use_cache
    model.config._name_or_path = "/moved/to/another/folder"
    model.set_attn_implementation("eager")
    torch.set_num_threads(torch.get_num_threads())
    assert digest_of(model, tmp_path) == before
    assert digest_of(build("llama", "sdpa", torch.float32), tmp_path) == before


def test_the_format_splits_the_store(model, tmp_path, monkeypatch):
    before = digest_of(model, tmp_path)
    monkeypatch.setattr("tierkv.integrations.hf_prefix.FORMAT", 2)
    assert digest_of(model, tmp_path) != before


def test_a_manifest_says_what_a_namespace_is(model, tmp_path):
    digest = digest_of(model, tmp_path, salt="a secret")
    (path,) = (tmp_path / "prefix" / "namespaces").glob("*.json")
    text = path.read_text()
    assert digest.hex()[:16] in path.name
    assert "a secret" not in text
    manifest = json.loads(text)
    found = manifest.get("manifest", manifest)
    assert found["salted"] is True
    assert found["config"]["model_type"] == "llama"
    assert found["kv"]["block_size"] == 16
    assert found["class"] == "LlamaForCausalLM"


def test_tenants_do_not_find_each_others_prefixes(lab, model, tmp_path):
    batch = lab.prompt(tokens=101)
    for salt, expected in (("a", 101), ("b", 101), ("a", 5), ("", 101)):
        with tierkv.attach(model, roomy(tmp_path, persist=True, salt=salt)):
            out, computed = first_forward(model, batch)
            assert computed == expected
            assert torch.equal(out, lab.stock(model, **batch, **GREEDY))


def test_keys_depend_on_every_token_before():
    start, ids = namespace_digest({"model": "m"}), list(range(40))
    keys = chain_keys(start, ids, 8)
    assert len(keys) == 5
    assert chain_keys(start, ids[:39], 8) == keys[:4]
    assert chain_keys(keys[1], ids[16:], 8) == keys[2:]
    changed = chain_keys(start, [*ids[:9], 99, *ids[10:]], 8)
    assert changed[0] == keys[0]
    assert not set(changed[1:]) & set(keys)
    assert not set(chain_keys(namespace_digest({"model": "n"}), ids, 8)) & set(keys)


def test_keys_are_these_and_no_others():
    """A change of what is hashed would silently lose every store."""
    assert namespace_digest({"b": 1, "a": [True, None, "x"]}) == namespace_digest({"a": [True, None, "x"], "b": 1})
    (key,) = chain_keys(namespace_digest({}), [1, -2, 3, 2**40], 4)
    assert key.hex() == "dc32db4ba46b2aa622eaaa570e4acb9b23d35a24e00150ec600ca5df717ad399"

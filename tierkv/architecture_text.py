"""The decoder's part of a ``config.json``, with one spelling for each name; models without a KV cache are refused here."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Final

from tierkv.errors import UnsupportedModel

# Where configs of several parts keep that of the language model, and other spellings of the names used here.
_NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
_KEPT: Final = ("model_type", "quantization_config", "tie_word_embeddings")
"""What holds for the language model though it is said of the whole."""
_SPELLINGS: Final = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "hidden_size": ("n_embd", "d_model", "model_dim"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length"),
    "layer_types": ("layers_block_type",),
    "sliding_window": ("attention_window_size", "sliding_window_size"),
    "num_key_value_heads": ("multi_query_group_num",),
}

LARGEST: Final = 1 << 31
"""No dimension of a model is larger."""
MOST_LAYERS: Final = 10_000
_SHOWN: Final = 60

# Models without a KV cache that grows: encoders, and layers that keep only a state.
_ENCODERS: Final = frozenset(
    {
        "albert", "bert", "bros", "camembert", "clip", "clip_text_model", "convbert", "deberta", "deberta-v2",
        "distilbert", "electra", "ernie", "esm", "eurobert", "flaubert", "funnel", "ibert", "layoutlm",
        "layoutlmv3", "longformer", "luke", "megatron-bert", "modernbert", "mobilebert", "mpnet", "mra",
        "nomic_bert", "nystromformer", "rembert", "roberta", "roc_bert", "roformer", "siglip", "splinter",
        "squeezebert", "vit", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso",
    }
)  # fmt: skip
_STATES: Final = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
_NOT_GENERATING: Final = ("ForMaskedLM", "Classification", "ForQuestionAnswering", "ForMultipleChoice")
_OWN_CACHES: Final = ("cpmant", "deepseek_v4", "diffusion_gemma", "dory", "inkling2_loop", "minimax_m3", "mllama")

# Sizes that files of a family leave out where they are the family's own.
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
        "max_position_embeddings": 131_072, "sliding_window": 4096,
    },
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "llama4_text": {"attention_chunk_size": 8192, "head_dim": 128},
    "recurrent_gemma": {"sliding_window": 2048},
}  # fmt: skip


class ImpossibleValue(UnsupportedModel):
    """A value that a config holds and no model has; other than for one that is missing, no default can help."""


def language_model(config: Mapping[str, Any]) -> SimpleNamespace:
    """Return the config of the decoder, with the names that this module uses.

    Raises:
        UnsupportedModel: there is no decoder that has a cache of its own.
    """
    if config.get("is_encoder_decoder"):
        raise UnsupportedModel(
            f"{named(config)} is an encoder-decoder, whose cross-attention cannot be tiered; give a decoder-only model"
        )
    values: dict[str, Any] = dict(config)
    for _ in _NESTED:
        inner = next((values[key] for key in _NESTED if isinstance(values.get(key), Mapping)), None)
        if inner is None:
            break
        kept: dict[str, Any] = {key: values[key] for key in _KEPT if key in values}
        values = {**kept, **inner}
    for ours, others in _SPELLINGS.items():
        found = next((values[name] for name in (ours, *others) if values.get(name) is not None), None)
        if found is not None:
            values[ours] = found
    if isinstance(values.get("attn_config"), Mapping):  # MPT
        values.setdefault("num_key_value_heads", values["attn_config"].get("kv_n_heads"))
    if not isinstance(values.get("model_type", ""), str | None):
        raise ImpossibleValue(f"model_type is {brief(values['model_type'])}; it must be the name of a family")
    kind = str(values.get("model_type") or "")
    for key, value in _DEFAULTS.get(kind, {}).items():
        if values.get(key) is None:
            values[key] = value
    _refuse(config, values, kind)
    return SimpleNamespace(**{str(key): value for key, value in values.items()})


def _refuse(config: Mapping[str, Any], values: Mapping[str, Any], kind: str) -> None:
    """Raise for a model that has no growing KV cache, or one of its own kind."""
    heads = [str(one) for one in listed(config, "architectures") or ()]
    encoder = kind in _ENCODERS or (bool(heads) and all(one.endswith(_NOT_GENERATING) for one in heads))
    if encoder and not values.get("is_decoder"):
        raise UnsupportedModel(
            f"{named(values)} has no KV cache: it reads its whole input at once; give a decoder-only language model"
        )
    if kind in _STATES:
        raise UnsupportedModel(
            f"{named(values)} has no KV cache: its layers keep a state of fixed size; give a model with attention layers"
        )
    if kind.startswith(_OWN_CACHES):
        raise UnsupportedModel(f"{named(values)} keeps its KV in a form of its own, which cannot be tiered")


def whole(text: SimpleNamespace, name: str, default: int | None = None) -> int:
    """Return a number of a config that has to be there, or ``default`` where it may be missing.

    Raises:
        UnsupportedModel: it is missing, or no whole number from 1 to 2^31.
    """
    found = optional(text.__dict__, name, least=1)
    if found is None and default is None:
        raise UnsupportedModel(f"{name} is missing; it must be a whole number from 1 up")
    return default if found is None and default is not None else found or 0


def optional(values: Mapping[str, Any], name: str, *, least: int = 0) -> int | None:
    """Return a number of a config that may be missing.

    Raises:
        ImpossibleValue: it is there, and no whole number from ``least`` to 2^31.
    """
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ImpossibleValue(f"{name} is {brief(value)}; it must be a whole number from {least} up")
    if value > LARGEST:
        raise ImpossibleValue(f"{name} is {brief(value)}, more than any model has; the most is {LARGEST:,}")
    return value


def listed(values: Mapping[str, Any], name: str) -> list[Any] | None:
    """Return a list of a config that may be missing.

    Raises:
        ImpossibleValue: it is there and no list of numbers or texts, or of far too many.
    """
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(one, int | str) for one in value):
        raise ImpossibleValue(f"{name} is {brief(value)}; it must be a list of numbers or names")
    if len(value) > MOST_LAYERS:
        raise ImpossibleValue(
            f"{name} lists {len(value):,} layers, more than any model has; the most is {MOST_LAYERS:,}"
        )
    return value


def brief(value: object) -> str:
    """Return a value as it is shown in a message: on one line, and not too long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def named(values: Mapping[str, Any]) -> str:
    """Return what a config calls its kind of model."""
    return str(values.get("model_type") or "this model")

"""What is wrong with a model's files, in one line that names the file.

Before loading only what nobody could load is refused. The rest is looked for once transformers has failed, as its own
words seldom name the file: so nothing is refused here that it would have read.
"""

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from tierkv.errors import ConfigError, UnsupportedModel

log = logging.getLogger(__name__)

_LIBRARY: Final = f"transformers {transformers.__version__}"
_INDEX: Final = "model.safetensors.index.json"
_AGAIN: Final = "get the file again from where the model came from"
# Errors whose text alone says nothing: KeyError('llama4') reads 'llama4'.
_TERSE: Final = (LookupError, TypeError, AttributeError, ArithmeticError)


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds no model.

    Raises:
        ConfigError: it has no config.json, or no safetensors.
    """
    ggufs = sorted(file.name for file in folder.glob("*.gguf"))
    hint = f"; it holds {ggufs[0]}: give the path of that file" if ggufs else ""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: not a model's folder, it has no config.json{hint}")
    if not any(file.is_file() for file in folder.glob("*.safetensors")):
        raise ConfigError(f"{folder}: it has no *.safetensors file; other formats of weights are not read{hint}")


def check_gguf(path: Path) -> None:
    """Refuse a file that is not GGUF.

    Raises:
        ConfigError: it is not, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    if magic == b"GGUF":
        return
    if path.suffix == ".safetensors":
        raise ConfigError(f"{path}: weights alone are not a model; give the folder with its config.json")
    if not magic:
        raise ConfigError(f"{path}: the file is empty; {_AGAIN}")
    raise ConfigError(f"{path}: not a model file (legal: a GGUF file, or a folder with config.json and safetensors)")


def check_weights(source: Path | str, found: Mapping[str, Any]) -> None:
    """Refuse a loaded model part of which is random, as its weights do not fit its config.json; warn of what was left out.

    Args:
        source: the folder, GGUF file or hub id that was loaded.
        found: the loading info of transformers.

    Raises:
        ConfigError: weights are missing or of another shape.
    """
    if differing := sorted(found["mismatched_keys"]):
        name, stored, wanted = differing[0]
        raise ConfigError(
            f"{source}: weights do not fit config.json: {_and_more(name, differing)}, {list(stored)} in the files and "
            f"{list(wanted)} by config.json; get config.json and weights of the same model"
        )
    if missing := sorted(found["missing_keys"]):
        what = f"weights that config.json asks for are missing: {_and_more(missing[0], missing)}"
        raise ConfigError(f"{source}: {what}; get the whole model")
    if unused := sorted(found["unexpected_keys"]):
        what = "weights for which config.json has no place are left out"
        log.warning("%s: %s: %s", source, what, _and_more(unused[0], unused))


def _and_more(first: str, names: Collection[object]) -> str:
    return f"{first} and {len(names) - 1} more" if len(names) > 1 else first


def model_error(source: Path | str, folder: Path | None, error: Exception) -> ConfigError | UnsupportedModel:
    """Return why a model could not be loaded.

    Args:
        source: the folder, GGUF file or hub id that was to be loaded.
        folder: where its files lie, or None for a GGUF file and where nobody knows.
        error: what transformers raised.
    """
    text = first_line(error)
    if "Unrecognized configuration class" in text:
        return UnsupportedModel(f"{source}: not a decoder-only language model; give one that continues text")
    if folder is None:
        what = "damaged, cut off, or of a kind that it does not know"
        return ConfigError(f"{source}: {_LIBRARY} cannot read it ({text}): {what}; get the file again, or another")
    config = folder / "config.json"
    if trouble := _json_trouble([config, folder / "generation_config.json", folder / _INDEX]):
        return ConfigError(trouble)
    if "does not recognize this architecture" in text:
        kind = json.dumps(json.loads(config.read_text(encoding="utf-8")).get("model_type"))
        newer = "correct it, or install a transformers that does"
        return ConfigError(f"{config}: {_LIBRARY} does not know the model_type {kind}; {newer}")
    if "Unrecognized model in" in text:
        return ConfigError(f"{config}: it has no model_type, which says what kind of model this is; {_AGAIN}")
    if "contains custom code" in text:
        never = "code beside a model is never run; give a model that transformers knows by itself"
        return ConfigError(f"{config}: the model needs code of its own (auto_map), and {never}")
    if trouble := _weights_trouble(folder):
        return ConfigError(trouble)
    if isinstance(error, StrictDataclassError):
        reason = str(error).strip().splitlines()[-1].strip().partition(": ")[2]
        return ConfigError(f"{config}: {reason.rstrip('.') or text}; {_AGAIN}")
    whole = "compare config.json with the one that the model came with"
    return ConfigError(f"{source}: {_LIBRARY} cannot load it ({text}); {whole}, or get the model again")


def tokenizer_error(source: Path | str, folder: Path | None, error: Exception) -> ConfigError:
    """Return why a model's tokenizer could not be loaded; the arguments are those of ``model_error``."""
    if folder is not None:
        if trouble := _json_trouble(sorted(folder.glob("*.json"))):
            return ConfigError(trouble)
        if not (folder / "tokenizer.json").is_file():
            where = "copy the tokenizer's files from where the model came from"
            return ConfigError(f"{folder}: it has no tokenizer.json, nor another tokenizer that can be read; {where}")
    return ConfigError(f"{source}: its tokenizer cannot be loaded ({first_line(error)}); get its files again")


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its first sentences where that is long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if not text or isinstance(error, _TERSE):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    sentences = text if len(text) <= 200 else text[:200].rpartition(". ")[0] or text[:197] + "..."
    return sentences.rstrip(".")


def _json_trouble(files: Iterable[Path]) -> str:
    """Return what is wrong with the first of these files that is there and is no JSON object, or nothing."""
    for file in files:
        if not file.is_file():
            continue
        content = ""
        try:
            content = file.read_text(encoding="utf-8")
            if not isinstance(json.loads(content), dict):
                return f"{file}: not a JSON object, as {{...}}; {_AGAIN}"
        except json.JSONDecodeError as error:
            where = f"not JSON at line {error.lineno}, column {error.colno}" if content.strip() else "the file is empty"
            return f"{file}: {where}; {_AGAIN}"
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, OSError):
                return f"{file}: cannot be read: {error.strerror or error}"
            return f"{file}: not JSON in UTF-8; {_AGAIN}"
    return ""


def _weights_trouble(folder: Path) -> str:
    """Return what is wrong with the files of weights that transformers would read, or nothing."""
    files = [folder / "model.safetensors"]
    if not files[0].is_file():
        index = folder / _INDEX
        if not index.is_file():
            found = min(folder.glob("*.safetensors"), default=folder).name
            return f"{folder}: its weights are not named model.safetensors but {found}; rename the file"
        names = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
        if not isinstance(names, dict):
            return f"{index}: it has no weight_map, which says where the weights are; {_AGAIN}"
        files = [folder / str(name) for name in sorted(set(map(str, names.values())))]
        if missing := [file for file in files if not file.is_file()]:
            return f"{missing[0]}: the file is missing, and {_INDEX} names it; get the whole model"
    return next(filter(None, map(_safetensors_trouble, files)), "")


def _safetensors_trouble(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            head = opened.read(32)
        if not head:
            return f"{file}: the file is empty; {_AGAIN}"
        if head.startswith(b"version https://git-lfs"):
            return f"{file}: Git LFS left a pointer here in place of the weights; run git lfs pull in its folder"
        with safe_open(file, framework="pt"):
            return ""
    except SafetensorError as error:
        return f"{file}: damaged or cut off ({first_line(error)}); {_AGAIN}"
    except OSError as error:
        return f"{file}: cannot be read: {error.strerror or error}"

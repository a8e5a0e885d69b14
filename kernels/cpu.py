"""The CPU kernels of ``cpu.cpp``: compiled on first use for one shape, kept in a cache folder, checked before each launch.

Compiling takes about a second and needs a C++ compiler (``$CXX``, else ``c++``). The OpenMP runtime is the one that
PyTorch has loaded, so both share one pool of threads.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import torch

from tierkv.errors import TierKVError
from tierkv.kernels.runs import Runs

SOURCE: Final = Path(__file__).with_name("cpu.cpp")
ELEMENTS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes of K and V that there is a kernel for."""

FLAGS: Final = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)
WIDE_VECTORS: Final = "-mprefer-vector-width=512"
MIN_SPLIT_TOKENS: Final = 256
"""A split of the context is worth a task of its own from here on."""

COMPILE_SECONDS: Final = 120

TILE: Final = 64
MOST_STACK_BYTES: Final = 2**18
"""What a thread of the kernel may take of its stack, which OpenMP makes small on some systems."""


class CompileError(TierKVError, RuntimeError):
    """The kernel cannot be compiled or loaded here; the message says why in one line."""


def unsupported(dtype: torch.dtype, key_dim: int, value_dim: int, group: int) -> str:
    """Return why there is no kernel for a shape; empty where there is one.

    Args:
        dtype: of query, K and V.
        key_dim: numbers of a head's key.
        value_dim: numbers of a head's value.
        group: query heads of a KV head.
    """
    if dtype not in ELEMENTS:
        return f"there is no CPU kernel for {str(dtype).removeprefix('torch.')}"
    rows = max(group, 16)
    stack_bytes = 4 * (rows * (key_dim + value_dim + TILE) + TILE * max(key_dim, value_dim))
    if min(key_dim, value_dim, group) < 1 or stack_bytes > MOST_STACK_BYTES:
        return f"there is no CPU kernel for heads of {key_dim} and {value_dim} numbers in groups of {group}"
    try:
        _library(dtype, key_dim, value_dim, group)
        _library(dtype, key_dim, value_dim, 1)  # whose append serves all
    except CompileError as error:
        return str(error)
    return ""


def attention(
    query: torch.Tensor,
    runs: Runs,
    member: int,
    *,
    start: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the tokens of ``runs``; see ``reference.attention`` for what is computed.

    Args:
        query: ``[rows, query_heads, queries, key_dim]``, of the dtype of K and V; dense in the last dimension.
        runs: where K and V lie, in memory that the CPU can read.
        member: which layer of the group.
        start: position of the first query.
        scale: factor of the scores.
        window: tokens that a query sees, itself included; None for all.
        softcap: limit of the scores, or None.

    Returns:
        Float32 output ``[rows, queries, query_heads, value_dim]`` and log-sum-exp ``[rows, queries, query_heads]``.

    Raises:
        ValueError: the tensors do not fit the runs.
        CompileError: there is no compiler.
    """
    rows, query_heads, queries, key_dim = query.shape
    _check(query, runs, member)
    if rows != runs.rows or key_dim != runs.key_dim or query_heads % runs.kv_heads or not queries:
        raise ValueError(f"a query of {tuple(query.shape)} does not fit {runs}")
    group = query_heads // runs.kv_heads
    library = _library(runs.dtype, runs.key_dim, runs.value_dim, group)
    together = 1 if queries == 1 else library.block_queries
    tasks = rows * runs.kv_heads * -(-queries // together)
    splits = max(1, min(-(-4 * torch.get_num_threads() // tasks), runs.most_tokens // MIN_SPLIT_TOKENS))
    partial = query.new_empty(tasks * splits * together * group * library.partial_floats, dtype=torch.float32)
    out = query.new_empty((rows, queries, query_heads, runs.value_dim), dtype=torch.float32)
    lse = query.new_empty((rows, queries, query_heads), dtype=torch.float32)
    library.attention(
        query.data_ptr(), query.stride(0), query.stride(1), query.stride(2), runs.table.data_ptr(),
        runs.row_starts.data_ptr(), rows, runs.kv_heads, queries, member, start, window or 0, scale, softcap or 0.0, splits,
        partial.data_ptr(), out.data_ptr(), lse.data_ptr(),
    )  # fmt: skip
    return out, lse


def append(keys: torch.Tensor, values: torch.Tensor, runs: Runs, member: int) -> None:
    """Write new tokens of one layer to where ``runs`` says they live.

    Args:
        keys: ``[rows, kv_heads, tokens, key_dim]``, dense in the last dimension.
        values: ``[rows, kv_heads, tokens, value_dim]``.
        runs: ``tokens`` tokens in every row.
        member: which layer of the group.

    Raises:
        ValueError: the tensors do not fit the runs.
        CompileError: there is no compiler.
    """
    rows, heads, tokens, _ = keys.shape
    _check(keys, runs, member)
    _check(values, runs, member)
    if keys.shape != (runs.rows, runs.kv_heads, runs.most_tokens, runs.key_dim) or values.shape != (
        *keys.shape[:3],
        runs.value_dim,
    ):
        raise ValueError(f"K of {tuple(keys.shape)} and V of {tuple(values.shape)} do not fit {runs}")
    _library(runs.dtype, runs.key_dim, runs.value_dim, 1).append(
        keys.data_ptr(), keys.stride(0), keys.stride(1), keys.stride(2), values.data_ptr(), values.stride(0), values.stride(1),
        values.stride(2), runs.table.data_ptr(), runs.row_starts.data_ptr(), rows, heads, tokens, member,
    )  # fmt: skip


def _check(tensor: torch.Tensor, runs: Runs, member: int) -> None:
    if tensor.dtype != runs.dtype or tensor.device.type != "cpu" or tensor.stride(-1) != 1:
        raise ValueError(
            f"the kernel takes dense {runs.dtype} on the CPU, not {tensor.dtype} on {tensor.device} of strides {tensor.stride()}"
        )
    if not 0 <= member < runs.members:
        raise ValueError(f"layer {member} is not one of the {runs.members} of the group")


class _Library:
    """The functions of one compiled shape."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, integer, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self.attention = library.tierkv_attention
        self.attention.argtypes = [
            pointer, *[integer] * 3, pointer, pointer, *[integer] * 6, real, real, integer, pointer, pointer, pointer,
        ]  # fmt: skip
        self.attention.restype = None
        self.append = library.tierkv_append
        self.append.argtypes = [pointer, *[integer] * 3, pointer, *[integer] * 3, pointer, pointer, *[integer] * 4]
        self.append.restype = None
        library.tierkv_block_queries.restype = library.tierkv_partial_floats.restype = integer
        self.block_queries: int = library.tierkv_block_queries()
        self.partial_floats: int = library.tierkv_partial_floats()


@functools.cache
def _library(dtype: torch.dtype, key_dim: int, value_dim: int, group: int) -> _Library:
    shape = {"ELEMENT": ELEMENTS[dtype], "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "GROUP": group}
    flags = [*FLAGS, *(f"-D{name}={value}" for name, value in shape.items())]
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append(WIDE_VECTORS)
    # The file is this machine's own: -march=native of another one in the same home folder would not run here.
    seen = repr((flags, SOURCE.read_bytes(), _processor(), torch.__version__)).encode()
    try:
        path = cache_folder() / f"cpu-{hashlib.sha256(seen).hexdigest()[:24]}.so"
        if not _is_whole(path):
            _compile(flags, path)
        return _Library(path)
    except CompileError:
        raise
    except (OSError, AttributeError, RuntimeError) as error:
        raise CompileError(
            f"the compiled kernel cannot be kept or loaded ({error}); set TIERKV_CACHE_DIR to a folder that can be written to"
        ) from None


def _is_whole(path: Path) -> bool:
    """Whether a kernel is there as it was compiled: a file that was cut off would crash the process that loads it."""
    try:
        return _digest_file(path).read_text() == hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return False


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _compile(flags: list[str], path: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(compiler[0]) is None:
        raise CompileError(f"there is no C++ compiler ({compiler[0]}); install one, or name it in CXX")
    command = [*compiler, *flags]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        try:
            done = subprocess.run(
                [*command, str(SOURCE), "-o", str(made)],
                capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise CompileError(f"{command[0]} did not finish within {COMPILE_SECONDS} s") from None
        if done.returncode:
            first = next(
                (line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip() or "no message"
            )
            raise CompileError(f"{command[0]} cannot compile the CPU kernel: {first}")
        digest = Path(folder) / "digest"
        digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
        made.replace(path)  # whole or not at all, whoever else compiles the same
        digest.replace(_digest_file(path))


def cache_folder() -> Path:
    """Return where compiled kernels are kept: ``$TIERKV_CACHE_DIR/kernels``, otherwise ``~/.cache/tierkv/kernels``."""
    root = os.environ.get("TIERKV_CACHE_DIR")
    return (Path(root) if root else Path("~/.cache/tierkv")).expanduser() / "kernels"


@functools.cache
def _processor() -> str:
    """Name the processor by what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())

"""Imports go one way, and each foreign library has one home.

The walk reads source, it does not import it, so that a late import inside a function and a type-only import count like
any other: a lower layer that has to name a higher one, even in an annotation, has its boundary in the wrong place.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up; a module imports its own layer and those below. A name covers its sub-modules and whatever was
# split off it: `config` stands for `config_toml` too.
LAYERS = (
    ("errors", "interrupts", "cuda_runtime"),
    (
        "tier",
        "sizes",
        "config",
        "budgets",
        "layout",
        "geometry",
        "capacity",
        "cost",
        "cold_reads",
        "keys",
        "eviction",
        "metrics",
    ),
    ("storage", "kernels"),
    ("block_pool", "block_table", "moves", "places", "placement", "transfer"),
    ("sharing", "room", "table_book"),
    ("manager",),
    ("prefetch", "paged", "run_tables", "fetch", "scratch", "stores", "bandwidths"),
    (
        "gate",
        "machine",
        "mover",
        "stepping",
        "usage",
        "report",
        "new_tokens",
        "rows",
        "promises",
        "orphans",
        "sequences",
        "payload",
        "prefix",
        "engine",
        "publish",
    ),
    ("integrations",),
    (
        "__init__",
        "architecture",
        "fit",
        "hardware",
        "charts",
        "page",
        "traces",
        "plan",
        "tune",
        "simulate",
        "virtual",
        "watch",
        "prometheus",
        "testing",
        "benchmarks",
    ),
    ("cli", "__main__"),
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# The libraries that only one place may name, and that place. Benchmarks also compare with transformers' own caches.
HOMES = {
    "transformers": ("tierkv.integrations", "tierkv.benchmarks"),
    "lmdb": ("tierkv.storage.disk", "tierkv.storage.prefix_index"),
    "triton": ("tierkv.kernels",),
}

# Decisions: given events, they answer with plans. So they run in tests, in a simulator and in any thread alike.
PURE = (
    "errors",
    "tier",
    "sizes",
    "config",
    "budgets",
    "layout",
    "geometry",
    "capacity",
    "cost",
    "cold_reads",
    "keys",
    "eviction",
    "metrics",
    "block_pool",
    "block_table",
    "moves",
    "places",
    "placement",
    "sharing",
    "room",
    "table_book",
    "manager",
    "traces",
)
IMPURE_LIBRARIES = {"torch", "lmdb", "threading", "asyncio", "concurrent", "multiprocessing", "queue"}

# Bytes on disk are framed and kept without knowing what a tensor is.
TORCH_FREE = (
    "storage.disk",
    "storage.codec",
    *(f"storage.{path.stem}" for path in (ROOT / "storage").glob("prefix_*.py")),
)


@cache
def sources() -> dict[str, Path]:
    """Map the full name of every module of the project to its file, in the real folders."""
    found = {}
    for top in ("tierkv", "kernels", "storage", "integrations", "benchmarks"):
        for path in (ROOT / top).rglob("*.py"):
            if path.is_symlink() or any(parent.is_symlink() for parent in path.relative_to(ROOT).parents):
                continue
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts if top == "tierkv" else ["tierkv", *parts])] = path
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """List the full names that a module imports, anywhere in its text."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(sources()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from tierkv import errors` names a module, `from tierkv.errors import StoreError` a thing inside one.
            joined = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = joined & set(sources())
            found.update(modules or {node.module})
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if called in {"import_module", "__import__"} and node.args and isinstance(node.args[0], ast.Constant):
                found.add(str(node.args[0].value))
    return frozenset(found)


def libraries(module: str) -> set[str]:
    """List the top-level names that a module imports."""
    return {name.partition(".")[0] for name in imports(module)}


def part(module: str) -> str:
    """Name the part of the library that a module belongs to, ``cli`` for ``tierkv.cli.app``."""
    name = module.split(".")[1] if "." in module else "__init__"
    stem = name
    while stem not in RANKS and "_" in stem:
        stem = stem.rpartition("_")[0]
    return stem if stem in RANKS else name


def own_imports(module: str) -> list[str]:
    """List the modules of this project that a module imports."""
    return [name for name in imports(module) if name.partition(".")[0] == "tierkv"]


def violations(module: str) -> list[str]:
    """List the imports of a module that point upwards."""
    top = len(LAYERS)  # what has no layer yet is another test's finding
    return [name for name in own_imports(module) if RANKS.get(part(name), 0) > RANKS.get(part(module), top)]


def test_the_walk_sees_every_folder_once():
    assert {"tierkv", "tierkv.errors", "tierkv.storage.base", "tierkv.integrations", "tierkv.benchmarks"} <= set(
        sources()
    )
    assert len(set(sources().values())) == len(sources())
    assert "tierkv.layout" in imports("tierkv.storage.base")


def test_every_module_has_a_layer():
    unplaced = sorted({part(module) for module in sources()} - set(RANKS))
    assert not unplaced, f"give {unplaced} a place in LAYERS"


def test_imports_go_one_way():
    upward = {module: names for module in sources() if (names := violations(module))}
    assert not upward


@pytest.mark.parametrize(("one", "other"), [("storage", "kernels"), ("kernels", "storage")])
def test_storage_and_kernels_do_not_know_each_other(one, other):
    found = {
        module: names
        for module in sources()
        if part(module) == one and (names := [name for name in own_imports(module) if part(name) == other])
    }
    assert not found


@pytest.mark.parametrize(("library", "homes"), HOMES.items())
def test_each_foreign_library_has_one_home(library, homes):
    users = {module for module in sources() if library in libraries(module)}
    strangers = {module for module in users if not f"{module}.".startswith(tuple(f"{home}." for home in homes))}
    assert not strangers


@pytest.mark.parametrize("name", PURE)
def test_decisions_import_no_tensor_no_thread_and_no_file_format(name):
    family = [module for module in sources() if part(module) == name]
    assert f"tierkv.{name}" in family
    assert not {module: found for module in family if (found := libraries(module) & IMPURE_LIBRARIES)}


def test_decisions_load_no_heavy_library_through_others():
    code = (
        f"import sys, importlib; [importlib.import_module('tierkv.' + name) for name in {PURE!r}]; "
        "print(*({'torch', 'lmdb', 'transformers', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", TORCH_FREE)
def test_the_disk_format_knows_no_torch(name):
    assert "torch" not in libraries(f"tierkv.{name}")


def test_nothing_imports_a_folder_under_its_top_level_name():
    tops = {"kernels", "storage", "integrations", "benchmarks"}
    assert not {module: found for module in sources() if (found := libraries(module) & tops)}

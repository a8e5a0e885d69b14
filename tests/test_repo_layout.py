"""The packaging promises: links, mapping and disk agree, and no folder of ours hides somebody else's package.

A checkout is read through committed links (``tierkv/kernels -> ../kernels``); wheels are built from the mapping in
``pyproject.toml``. When the two drift apart one of them silently loses modules, which no other test would notice.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tierkv

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("kernels", "storage", "integrations", "benchmarks")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def run_python(code: str, *, cwd: Path, path: str = "") -> str:
    """Run code in a fresh interpreter whose first import path is ``cwd``; return what it prints."""
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def folders_with_modules() -> set[str]:
    """Name every package by what lies on disk: real folders, and the linked ones under their real place."""
    found = set()
    for top in ("tierkv", *LINKED):
        prefix = "tierkv" if top == "tierkv" else f"tierkv.{top}"
        for folder, subfolders, files in os.walk(ROOT / top):  # os.walk does not follow links
            subfolders[:] = [name for name in subfolders if name != "__pycache__"]
            if any(name.endswith(".py") for name in files):
                found.add(".".join((prefix, *Path(folder).relative_to(ROOT / top).parts)))
    return found


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative_and_resolve_to_the_top_level_folders(name):
    link = ROOT / "tierkv" / name
    assert link.is_symlink(), f"{link} is not a link: check out with link support, or recreate it"
    assert link.readlink() == Path("..", name)
    assert link.resolve() == ROOT / name
    assert (ROOT / name).is_dir()


def test_the_mapping_names_the_same_folders_as_the_links():
    links = {path.name for path in (ROOT / "tierkv").iterdir() if path.is_symlink()}
    assert links == set(LINKED)
    assert SETUPTOOLS["package-dir"] == {"tierkv": "tierkv", **{f"tierkv.{name}": name for name in LINKED}}


def test_packages_equal_the_folders_that_hold_modules():
    packages = set(SETUPTOOLS["packages"])
    assert len(packages) == len(SETUPTOOLS["packages"])
    # kernels is listed from the first day on and may hold no module yet; every other package must.
    assert packages - folders_with_modules() <= {"tierkv.kernels"}
    assert folders_with_modules() <= packages, "name new folders in [tool.setuptools] packages"


def test_kernels_is_not_a_regular_package():
    assert not (ROOT / "kernels" / "__init__.py").exists(), "kernels/README.md says why"


def test_an_installed_kernels_package_wins_inside_the_checkout(tmp_path):
    fake = tmp_path / "kernels"
    fake.mkdir()
    (fake / "__init__.py").write_text("OWNER = 'somebody else'\n", encoding="utf-8")
    # Appended, as site-packages is: our folder comes first on the path and must lose all the same.
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.OWNER)"
    assert run_python(code, cwd=ROOT) == "somebody else"


def test_importing_tierkv_loads_no_heavy_library(tmp_path):
    code = (
        "import sys, tierkv; "
        "print(*({'transformers', 'triton', 'lmdb', 'torch', 'numpy', 'pydantic', 'typer'} & set(sys.modules)))"
    )
    assert run_python(code, cwd=tmp_path) == ""


def test_the_checkout_is_not_on_the_import_path_of_others(tmp_path):
    code = (
        "import importlib.util as util, pathlib; "
        f"specs = [util.find_spec(name) for name in {LINKED!r}]; "
        "places = [str(place) for spec in specs if spec for place in spec.submodule_search_locations or ()]; "
        "print(*places, sep='\\n')"
    )
    places = [Path(place).resolve() for place in run_python(code, cwd=tmp_path).splitlines()]
    assert not [place for place in places if ROOT in place.parents]


def test_the_version_is_stated_once_in_two_places():
    assert tierkv.__version__ == PROJECT["project"]["version"]

"""A tiny model in a folder, and two ways to run the command line."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from tests.cli.commands import save_tiny_model
from tierkv.cli.commands import app


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run tiny models on one thread: on a busy machine two spend their time waiting for each other."""
    threads = torch.get_num_threads()
    if request.node.get_closest_marker("model") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of the tiny model."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Leave only one TIERKV_ setting: a store of this test's own, whose folder is returned."""
    for name in [name for name in os.environ if name.startswith("TIERKV_")]:
        monkeypatch.delenv(name)
    store = tmp_path / "store"
    monkeypatch.setenv("TIERKV_DISK__PATH", str(store))
    return store


@pytest.fixture
def cli(clean_environment: Path) -> Callable[..., Result]:
    """Run a command line in this process."""

    def run(*args: object, input: str | bytes | None = None) -> Result:  # noqa: A002 - typer's own name for it
        result = CliRunner().invoke(app, [str(arg) for arg in args], input=input)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def start(clean_environment: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a command line in a process of its own."""

    def run(*args: object, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tierkv", *map(str, args)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip

    return run


@pytest.fixture
def kept(clean_environment: Path) -> Path:
    """A store with two namespaces: chains of 5 and 2 blocks that share one, and one of 3 blocks."""
    from tests.cli.stores import MANIFEST, branch
    from tests.storage.prefixes import NAMESPACE, OTHER, chain, keys_of, prefixes, put_all

    with prefixes(clean_environment) as store:
        store.namespace(NAMESPACE, MANIFEST)
        put_all(store, chain(1, 5))
        put_all(store, [chain(1, 1)[0], branch()])
        put_all(store, chain(2, 3, 8000, OTHER), OTHER)
        store.touch(keys_of(chain(1, 5)))
        store.pin(keys_of(chain(2, 3, 8000, OTHER)), None)
        assert store.flush(10)
    return clean_environment

"""What every test shares: no network, two ways to run property tests, and a private place to publish engines in."""

import os
import signal
import tempfile
import threading
from pathlib import Path

# Before anything imports transformers, which reads this once. A test that needs a download is a wrong test.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell lets its jobs in the background ignore Ctrl-C, and so would every process that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, settings

from tierkv import publish_folder
from tierkv.publish import Publisher

# Contract suites live in the library, where pytest would not explain a failed assertion unless told to.
pytest.register_assert_rewrite("tierkv.testing.contracts")

# `ci` draws the same examples in every run, so that a failure is the change's and not the day's. No deadline: a shared
# machine may stall any example. `deep` looks for new ones: HYPOTHESIS_PROFILE=deep make quick.
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", max_examples=2_000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """Give the folder that stands for ``$XDG_RUNTIME_DIR``; the other place is a folder of the test's own too."""
    # Not below tmp_path: with the test's name in it, the path of a socket is soon longer than the 107 bytes it may have.
    with tempfile.TemporaryDirectory(prefix="tierkv-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setattr(publish_folder, "SHARED", tmp_path)
        yield Path(folder)


@pytest.fixture
def publisher(runtime):
    """Give a publisher of a test's own, and make sure that nothing of it is left."""
    one = Publisher()
    yield one
    one.close()
    assert not list(runtime.rglob("*.sock"))
    assert not [thread for thread in threading.enumerate() if thread.name == "tierkv-publish"]

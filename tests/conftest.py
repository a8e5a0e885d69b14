"""What every test shares: no network, and two ways to run property tests."""

import os
import signal

# Before anything imports transformers, which reads this once. A test that needs a download is a wrong test.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell lets its jobs in the background ignore Ctrl-C, and so would every process that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, settings

# Contract suites live in the library, where pytest would not explain a failed assertion unless told to.
pytest.register_assert_rewrite("tierkv.testing.contracts")

# `ci` draws the same examples in every run, so that a failure is the change's and not the day's. No deadline: a shared
# machine may stall any example. `deep` looks for new ones: HYPOTHESIS_PROFILE=deep make quick.
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", max_examples=2_000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

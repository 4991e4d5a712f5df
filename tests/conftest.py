"""What every test run shares: one thread a process, one seed a test, no CUDA test without a device."""

import contextlib
import os
import sys

import pytest

# Tests use tiny tensors and run side by side; the variable is read when torch is first imported, which this file leaves
# to the tests that need it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):
    from hypothesis import settings

    # The same examples every time; --hypothesis-profile long looks for others.
    settings.register_profile("tests", deadline=None, derandomize=True, print_blob=True, stateful_step_count=20)
    settings.register_profile("long", deadline=None, max_examples=2000, print_blob=True, stateful_step_count=60)
    settings.load_profile("tests")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random numbers of a test are the same alone, in any order and on any worker."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)

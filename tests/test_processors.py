"""A slice of `make test-processors`: golden losses and the torch runtime as older processors compute them."""

import pytest
from processors import AVX2, SSE4, run_tests

FILES = ["tests/test_experiments.py", "tests/gates/test_gates.py", "tests/deploy/test_runtime.py"]


@pytest.mark.parametrize("settings", [SSE4, AVX2], ids=["SSE4", "AVX2"])
def test_golden_losses_and_the_runtime_hold_on_another_processor(settings):
    done = run_tests(settings, "-k", "golden or test_runtime", *FILES)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout.splitlines()[-1]

"""A slice of `make test-processors`: golden losses and the skipping runtime as older processors compute them."""

import pytest
from processors import AVX2, SSE4, run_tests

FILES = [f"tests/test_{name}.py" for name in ("experiments", "gates", "runtime")]
ONCE = "not predictive_aggressive and not predictive_conservative"  # what others compute as well


@pytest.mark.parametrize("settings", [SSE4, AVX2], ids=["SSE4", "AVX2"])
def test_golden_losses_and_the_runtime_hold_on_another_processor(settings):
    done = run_tests(settings, "-k", f"(golden or test_runtime) and {ONCE}", *FILES)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout.splitlines()[-1]

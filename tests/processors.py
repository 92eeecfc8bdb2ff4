"""Runs the tests of what computes as other processors would: `make test-processors`.

PyTorch, oneDNN and MKL are limited to an older processor's instructions, and choose the kernels that they would choose
there.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SSE4 = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
PROCESSORS = {
    "SSE4": SSE4,
    "AVX2": AVX2,
    "AVX-512 without VNNI and BF16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "this one": {},
    "this one with 4 threads": {"TEST_THREADS": "4", "OMP_WAIT_POLICY": "passive"},  # threads may outnumber cores
}


def run_tests(settings: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    """Runs pytest in a process of its own with these settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "OMP_"))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=inherited | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def main() -> None:
    spread = ["-n", "2", "--dist", "loadscope", "--no-loadscope-reorder", "-m", "numeric and not slow and not data"]
    failed = 0
    for name, settings in PROCESSORS.items():
        began = time.monotonic()
        done = run_tests(settings, *spread, *sys.argv[1:])
        failed += done.returncode != 0
        summary = done.stdout.strip() if done.returncode else done.stdout.strip().splitlines()[-1]
        print(f"{name}: {summary} ({time.monotonic() - began:.0f} s by the clock)", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

"""Helpers that the tests of the package share. They use the checkpoints and the comparisons of `tests/python`."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import unittest
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/python"))

import tensorfs  # noqa: E402
from mounts import FIXTURES, Mount, TestCase, wait_until  # noqa: E402, F401

# Most checkpoints of tests are rank shards, which cause this warning. `test_tails.py` tests the warning itself.
warnings.filterwarnings("ignore", category=tensorfs.UnprovenTailWarning)

has_torch = importlib.util.find_spec("torch") is not None
needs_torch = unittest.skipUnless(has_torch, "needs torch")
needs_ml_dtypes = unittest.skipUnless(importlib.util.find_spec("ml_dtypes"), "needs ml_dtypes")


def python(code, *arguments, seconds=60, **environment):
    """Runs `code` in another interpreter and returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment},
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"exit status {done.returncode}: {done.stderr}")
    return done.stdout


@contextlib.contextmanager
def environment(**variables):
    """Sets environment variables for the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def threads():
    """The names that the threads of this process have in the kernel."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        # If a thread ends between open and read, the error is ESRCH and not ENOENT.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text().strip())
    return names


def dlpack_bytes(opened):
    """The tensors of an open checkpoint: name -> dtype, shape and bytes."""
    return {name: (t.dtype, list(t.shape), t.tobytes()) for name, t in opened.get_tensors().items()}

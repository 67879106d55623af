"""Runs the test suite of safetensors with our `safe_open` in place of its own.

    python python/tests/safetensors_suite.py [SDIST] [PYTEST OPTION]...

Needs an environment with this package, safetensors, torch, numpy, pytest and fsspec. SDIST is
`safetensors-0.8.0.tar.gz`; without it pip downloads it. Tests of frameworks that are not installed are left out. `test_handle.py` opens file objects by a private class that is not replaced.
"""

import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.8.0"

# For each framework: its tests, its module in safetensors, and its package.
OTHERS = [
    ("test_flax_comparison.py", "flax", "jax"),
    ("test_mlx_comparison.py", "mlx", "mlx"),
    ("test_paddle_comparison.py", "paddle", "paddle"),
    ("test_tf_comparison.py", "tensorflow", "tensorflow"),
]

# This code is a plugin, because a plugin is imported before any test imports a name.
PLUGIN = """
import importlib

import safetensors
import safetensors.numpy
import safetensors.torch
import tensorfs

opened = 0


class Counted(tensorfs.safe_open):
    def __init__(self, *args, **kwargs):
        global opened
        opened += 1
        super().__init__(*args, **kwargs)


for module in (safetensors, safetensors.numpy, safetensors.torch, *map(importlib.import_module, OTHERS)):
    module.safe_open = Counted


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"tensorfs.safe_open opened {opened} files")


def pytest_sessionfinish(session, exitstatus):
    if not opened and not session.config.option.collectonly:
        session.exitstatus = 1
"""


def main():
    arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="tensorfs-suite-") as folder:
        folder = Path(folder)
        sdist = Path(arguments.pop(0)) if arguments and arguments[0].endswith(".tar.gz") else download(folder)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        tests = folder / f"safetensors-{VERSION}" / "bindings" / "python"
        (tests / "tests" / "data").mkdir(exist_ok=True)
        found = [f"safetensors.{module}" for _, module, package in OTHERS if importlib.util.find_spec(package)]
        (tests / "tensorfs_in_place.py").write_text(f"OTHERS = {found}\n{PLUGIN}")
        left_out = [f"--ignore=tests/{name}" for name, _, package in OTHERS if not importlib.util.find_spec(package)]
        command = [sys.executable, "-m", "pytest", "-p", "tensorfs_in_place", "-q", *left_out, *arguments, "tests"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path[1:]])}
        return subprocess.run(command, cwd=tests, env=environment, check=False).returncode


def download(folder):
    """Downloads the sdist. pip needs maturin to make its metadata."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "safetensors"]
        + ["--dest", str(folder), f"safetensors=={VERSION}"],
        check=True,
    )
    return folder / f"safetensors-{VERSION}.tar.gz"


if __name__ == "__main__":
    sys.exit(main())

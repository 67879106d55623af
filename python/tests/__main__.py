"""Runs the tests of the package: `python python/tests [-k PATTERN]... [-f] [-j JOBS]`, as `tests/python` does."""

import importlib.util
import sys
from pathlib import Path

import package

spec = importlib.util.spec_from_file_location("suite", package.ROOT / "tests/python/__main__.py")
suite = importlib.util.module_from_spec(spec)
spec.loader.exec_module(suite)
# If there is a GPU, the tests run one after the other, because they share it.
jobs = {"jobs": 1} if Path("/dev/nvidiactl").exists() else {}
sys.exit(suite.main(str(Path(__file__).parent), **jobs))

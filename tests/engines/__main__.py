"""Runs these tests: `python tests/engines [-k PATTERN]...`. Tests of an engine that is not installed are skipped."""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python/tests"))
# vLLM chooses its platform by this variable, even if it was built for another one.
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

spec = importlib.util.spec_from_file_location("suite", ROOT / "tests/python/__main__.py")
suite = importlib.util.module_from_spec(spec)
spec.loader.exec_module(suite)
sys.exit(suite.main(str(Path(__file__).parent), jobs=1))

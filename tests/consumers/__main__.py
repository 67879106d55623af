"""Tests unmodified programs that read weights on real mounts: `python tests/consumers [-k NAME]...`. Each test is a row
of `docs/reference/consumers.md`. Programs that are not installed are skipped. `requirements.txt` has the Python
packages, and COMFYUI_SOURCES names a checkout of ComfyUI."""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/python"))
# The first two variables forbid requests to a hub. vLLM chooses its platform by the third.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_TARGET_DEVICE="cpu", KERAS_BACKEND="torch")

spec = importlib.util.spec_from_file_location("suite", ROOT / "tests/python/__main__.py")
suite = importlib.util.module_from_spec(spec)
spec.loader.exec_module(suite)
sys.exit(suite.main(str(Path(__file__).parent), jobs=1))

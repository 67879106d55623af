"""Tests unmodified released servers as sources: `python tests/servers [-k NAME]...`. Servers that are not installed are
skipped. `requirements.txt` has the Python packages. Azurite is the npm package `azurite@3.35.0`. s3s-fs is installed by
`cargo install s3s-fs --version 0.14.1 --features binary --locked`."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/python"))

spec = importlib.util.spec_from_file_location("suite", ROOT / "tests/python/__main__.py")
suite = importlib.util.module_from_spec(spec)
spec.loader.exec_module(suite)
sys.exit(suite.main(str(Path(__file__).parent), jobs=1))

"""Runs the tests of the consolidation of torch or NeMo AutoModel with our replacement of their function.

    python python/tests/consolidation_suite.py TEST_FILE [PYTEST OPTION]...

TEST_FILE is `test/distributed/checkpoint/test_consolidate_hf_safetensors.py` in a checkout of PyTorch, or
`tests/unit_tests/checkpoint/test_consolidate_safetensors.py` in one of NeMo AutoModel. Needs an environment with this
package, torch, safetensors, numpy, pytest and expecttest. Tests that ask for GPUs run on the CPU if there is no GPU.
docs/guides/consolidate.md has the results.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Python imports this module when it starts, even in the ranks that a test starts.
IN_PLACE = """
import os
import sys

sys.path.append({examples!r})

import consolidate_safetensors_files as ours
import torch
import torch.distributed.checkpoint
import torch.distributed.checkpoint._consolidate_hf_safetensors
import torch.testing._internal.common_distributed as common

try:
    import nemo_automodel.components.checkpoint._backports.hf_storage
except ImportError:
    pass


def counted(function):
    def call(*args, **kwargs):
        with open({calls!r}, "a") as file:
            file.write(function.__name__ + "\\n")
        return function(*args, **kwargs)

    return call


for name in ("consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank"):
    for module in [m for key, m in sys.modules.items() if key.startswith(("torch.", "nemo_automodel."))]:
        if name in vars(module):
            setattr(module, name, counted(getattr(ours, name)))
if not torch.accelerator.is_available():
    common.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
"""


def main():
    test, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="tensorfs-suite-") as folder:
        calls = Path(folder, "calls")
        calls.touch()
        site = IN_PLACE.format(examples=str(ROOT / "examples"), calls=str(calls))
        Path(folder, "sitecustomize.py").write_text(site)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *sys.path[1:]])}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, test]
        code = subprocess.run(command, env=environment, check=False).returncode
        print(f"calls of the drop-in: {len(calls.read_text().splitlines())}")
    return code


if __name__ == "__main__":
    sys.exit(main())

"""The committed PTX text is what the committed source makes."""

import importlib.util
import unittest
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "src/device/make_ptx.py"
spec = importlib.util.spec_from_file_location("make_ptx", SCRIPT)
make_ptx = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_ptx)


class Ptx(unittest.TestCase):
    @unittest.skipUnless(make_ptx.installed(), f"{make_ptx.PACKAGE} {make_ptx.VERSION} is not installed")
    def test_the_kernels_are_what_their_source_makes(self):
        self.assertEqual(make_ptx.PTX.read_text(), make_ptx.make(make_ptx.installed()), "run src/device/make_ptx.py")

"""The examples of the documentation work as they stand."""

import contextlib
import os
import re

from package import ROOT, TestCase


class Readme(TestCase):
    def test_the_lines_of_the_readme_work(self):
        text = (ROOT / "README.md").read_text()
        section = text.partition("## Load\n")[2].partition("\n## ")[0]
        (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        names = {}
        with in_folder(ROOT):
            exec(code, names)
        self.assertEqual(names["weight"].ndim, 2)
        self.assertGreater(len(names["weights"]), 1)

    def test_the_variables_of_the_documentation_are_those_that_are_read(self):
        text = (ROOT / "docs/guides/python.md").read_text()
        source = (ROOT / "python/python/tensorfs/_settings.py").read_text()
        named = {name.lower() for name in re.findall(r"`TENSORFS_(\w+)`", text)}
        # `TENSORFS_BIN` is no setting: `tensorfs.mount` reads it.
        self.assertEqual(named - {"bin"}, set(re.findall(r'chosen\("(\w+)"', source)))


@contextlib.contextmanager
def in_folder(folder):
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)

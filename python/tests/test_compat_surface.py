"""The public names, methods and arguments of fastsafetensors and instanttensor, which `tensorfs.compat` has too."""

import importlib
import inspect
import unittest

from package import ROOT, TestCase, needs_torch
from tensorfs.compat import fastsafetensors, instanttensor

PAGE = ROOT / "docs/guides/other-loaders.md"

LEFT_OUT = {"ParallelSaver", "get_device_numa_node", "live_allocation_bytes", "live_allocation_count"}

# Names that are not for callers of the package: the constructors that its classes call, and its copiers.
INTERNAL = {
    "FilesBufferOnDevice.__init__", "SafeTensorsFileLoader.init_numa", "SafeTensorsFileLoader.process_extension_config",
    "SafeTensorsMetadata.__init__", "SafeTensorsMetadata.from_buffer", "SafeTensorsMetadata.from_fd", "SafeTensorsMetadata.get_tensors",
    "SafeTensorsMetadata.select_byte_ranges", "TensorFrame.__init__", "TensorFrame.from_buffer",
}  # fmt: skip


def genuine(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        raise unittest.SkipTest(f"needs {name}") from None


def public(module):
    own = {name for name, what in vars(module).items() if getattr(what, "__module__", "").startswith(module.__name__)}
    return {name for name in own if not name.startswith("_")}


def arguments(module, names):
    """Name of each function, class and public method -> the names of its arguments."""
    found = {}
    for name in names:
        one = getattr(module, name)
        if inspect.isfunction(one):
            found[name] = list(inspect.signature(one).parameters)
        elif inspect.isclass(one) and not issubclass(one, Exception):
            for base in reversed(one.__mro__[:-1]):
                for method, body in vars(base).items():
                    body = getattr(body, "__func__", body)
                    if inspect.isfunction(body) and (method == "__init__" or not method.startswith("_")):
                        found[f"{name}.{method}"] = list(inspect.signature(body).parameters)
    return {name: words for name, words in found.items() if name not in INTERNAL}


@needs_torch
class Surface(TestCase):
    def differences(self, package, ours, names):
        right, found = arguments(package, names), arguments(ours, names)
        self.assertGreater(len(right), 5)
        return {name: (words, found.get(name)) for name, words in right.items() if found.get(name, [])[1:] != words[1:]}

    def test_fastsafetensors_has_no_other_name_or_argument(self):
        package = genuine("fastsafetensors")
        self.assertEqual(public(package) - set(fastsafetensors.__all__), LEFT_OUT)
        page = PAGE.read_text()
        self.assertEqual([name for name in public(package) if f"`{name}`" not in page], [])
        self.assertEqual(self.differences(package, fastsafetensors, public(package) - LEFT_OUT), {})

    def test_instanttensor_has_no_other_name_or_argument(self):
        package = genuine("instanttensor")
        self.assertEqual(set(package.__all__), set(instanttensor.__all__))
        page = PAGE.read_text()
        words = set(inspect.signature(package.safe_open.__init__).parameters) - {"self", "filename", "framework", "device"}
        self.assertEqual([word for word in words | set(package.__all__) if f"`{word}`" not in page], [])
        self.assertEqual(self.differences(package, instanttensor, ["safe_open"]), {})

"""Every public name of safetensors exists in this package, with the same arguments."""

import ast
import importlib
import inspect
import pickle
import typing
from pathlib import Path

import safetensors

from package import TestCase

FOLDER = Path(safetensors.__file__).parent
MODULES = sorted(file.stem for file in FOLDER.glob("*.py") if not file.stem.startswith("_"))
# Names of the next version of safetensors, from its changes.
NEXT = {"PrefetchLoader", "PySafeSlice", "TensorMeta"}
# These names need the framework, so `import *` leaves them out.
LATER = {"paddle": {"NPDTYPES"}}
NEXT_OF_SAFE_OPEN = {"get_tensor_meta", "prefetch"}


def functions(module):
    """Name -> arguments of each public function of a module. The module is not imported, because it may need packages
    that are not installed."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    return {
        node.name: node.args
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    }


def constants(module):
    """The public names that a module assigns."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    targets = (target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets)
    return {target.id for target in targets if isinstance(target, ast.Name) and not target.id.startswith("_")}


def imported(module):
    """The names that a module imports from safetensors itself."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    found = (node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "safetensors")
    names = {alias.asname or alias.name for node in found for alias in node.names}
    return names - set(MODULES)


class PublicNames(TestCase):
    def test_type_hints_are_found_at_run_time(self):
        import tensorfs

        for name in sorted(tensorfs.__all__):
            value = getattr(tensorfs, name)
            methods = vars(value).values() if inspect.isclass(value) else ()
            for function in (value, *methods):
                if inspect.isfunction(function):
                    with self.subTest(name=name, function=function.__name__):
                        typing.get_type_hints(function)

    def test_the_package_has_every_name_of_safetensors(self):
        names = {name for name in vars(safetensors) if not name.startswith("_")} - {*MODULES}
        self.assertLessEqual({"safe_open", "serialize", "serialize_file", "TensorSpec", "deserialize"}, names)
        ours = importlib.import_module("tensorfs")
        self.assertEqual({name for name in names | NEXT if not hasattr(ours, name)}, set())
        self.assertTrue(issubclass(ours.SafetensorError, Exception))

    def test_an_open_file_has_every_method_of_safetensors(self):
        ours = importlib.import_module("tensorfs")
        for mine, theirs, more in (
            (ours.safe_open, safetensors.safe_open, NEXT_OF_SAFE_OPEN),
            (ours.PrefetchLoader, object, {"names", "take", "close", "__len__", "__iter__", "__enter__", "__exit__"}),
            (ours.PySafeSlice, object, {"get_shape", "get_dtype", "__getitem__"}),
        ):
            names = {name for name in dir(theirs) if not name.startswith("_")} | more
            self.assertEqual({name for name in names if not hasattr(mine, name)}, set(), mine)
        self.assertLessEqual({"dtype", "shape", "data_offsets"}, set(ours.TensorMeta._fields))

    def test_the_modules_of_the_frameworks_have_the_same_functions_with_the_same_arguments(self):
        self.assertLessEqual({"flax", "mlx", "numpy", "paddle", "tensorflow", "torch"}, set(MODULES))
        for module in MODULES:
            ours = importlib.import_module(f"tensorfs.{module}")
            for name, theirs in functions(module).items():
                with self.subTest(module=module, name=name):
                    found = inspect.signature(getattr(ours, name))
                    given = [argument.arg for argument in theirs.args]
                    kinds = {inspect.Parameter.POSITIONAL_OR_KEYWORD}
                    plain = [word for word, found in found.parameters.items() if found.kind in kinds]
                    self.assertEqual(plain[: len(given)], given)
                    words = {argument.arg for argument in theirs.kwonlyargs}
                    self.assertLessEqual(words, {*found.parameters})
            with self.subTest(module=module):
                self.assertEqual(constants(module) - set(ours.__all__), LATER.get(module, set()))
                for name in ours.__all__:
                    self.assertTrue(hasattr(ours, name), name)
            self.assert_functions(ours, functions(module))
            for name in imported(module):
                with self.subTest(module=module, name=name):
                    self.assertTrue(hasattr(ours, name))

    def assert_functions(self, ours, theirs):
        """They are functions of their module, and their first arguments have the defaults and kinds of safetensors."""
        try:
            genuine = importlib.import_module(ours.__name__.replace("tensorfs", "safetensors"))
        except ImportError:
            genuine = None
        for name in theirs:
            mine = getattr(ours, name)
            with self.subTest(module=ours.__name__, name=name):
                if inspect.isclass(mine):
                    continue
                self.assertTrue(inspect.isfunction(mine))
                self.assertEqual((mine.__module__, mine.__qualname__, mine.__name__), (ours.__name__, name, name))
                self.assertIs(pickle.loads(pickle.dumps(mine)), mine)
                self.assertTrue(mine.__doc__)
                self.assertIn("return", mine.__annotations__)
                if genuine is not None:
                    right = inspect.signature(getattr(genuine, name)).parameters
                    found = inspect.signature(mine).parameters
                    facts = [(one.name, one.kind, one.default) for one in right.values()]
                    self.assertEqual([(found[one].name, found[one].kind, found[one].default) for one in right], facts)

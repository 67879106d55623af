"""`patched()`, for code that uses safetensors and cannot be changed."""

import asyncio
import contextlib
import contextvars
import sys
import threading
import types
from unittest import mock

import numpy as np
import safetensors
import safetensors.numpy
from safetensors import safe_open as bound_by_name
from safetensors.numpy import load_file, save_file

import tensorfs
from checkpoints import hf_set
from package import TestCase, needs_torch, python


class Patched(TestCase):
    def setUp(self):
        super().setUp()
        self.file = self.tmp / "model.safetensors"
        self.tensors = {"a": np.arange(6.0).reshape(2, 3), "b": np.arange(4)}
        save_file(self.tensors, self.file)

    def is_ours(self, open_=None):
        with (open_ or safetensors.safe_open)(self.file, "np") as f:
            return isinstance(f, tensorfs.safe_open)

    def test_tensors_are_shared_in_blocks_that_say_so(self):
        def owns():
            with safetensors.safe_open(self.file, "np") as f:
                return f._reader().copy

        with tensorfs.patched(copy=False):
            self.assertFalse(owns())
            np.testing.assert_array_equal(safetensors.numpy.load_file(self.file)["a"], self.tensors["a"])
            with tensorfs.patched(copy=True):
                self.assertTrue(owns())
            self.assertIs(owns(), False)

    def test_names_bound_anywhere_are_ours_within_the_block_only(self):
        genuine = safetensors.safe_open
        self.assertFalse(self.is_ours())
        with tensorfs.patched():
            self.assertTrue(self.is_ours() and self.is_ours(safetensors.numpy.safe_open) and self.is_ours(bound_by_name))
            with tensorfs.patched():
                self.assertTrue(self.is_ours())
            self.assertTrue(self.is_ours())
            with safetensors.safe_open(self.file, "np") as f:
                self.assertIsInstance(f, safetensors.safe_open)
        self.assertFalse(self.is_ours())
        self.assertIs(safetensors.safe_open, genuine)
        self.assertIs(safetensors.numpy.safe_open, genuine)
        self.assertIs(bound_by_name, genuine)

    def test_only_modules_that_changed_are_searched_again(self):
        with tensorfs.patched():
            pass
        late = types.ModuleType("late")
        kind = tensorfs._patch._Searched
        counted = mock.patch.object(kind, "search", autospec=True, side_effect=kind.search)
        with mock.patch.dict(sys.modules, late=late), counted as searched:
            with tensorfs.patched():
                late.name = safetensors.safe_open
                self.assertTrue(self.is_ours(late.name))
            self.assertFalse(self.is_ours(late.name))
            self.assertIs(late.name, safetensors.safe_open)
            with tensorfs.patched():
                self.assertTrue(self.is_ours(late.name))
            self.assertLess(searched.call_count, 10)

    def test_a_module_that_imports_it_later_in_place_of_none_is_ours_too(self):
        late = types.ModuleType("late")
        late.safe_open = None
        with mock.patch.dict(sys.modules, late=late):
            with tensorfs.patched():
                pass
            late.safe_open = safetensors.safe_open
            with tensorfs.patched():
                self.assertTrue(self.is_ours(late.safe_open))
            self.assertIs(late.safe_open, safetensors.safe_open)

    def test_load_file_takes_what_only_we_can_open(self):
        folder = hf_set(self.tmp / "hf")
        with self.assertRaises(Exception):
            load_file(folder)
        with tensorfs.patched():
            tensors = load_file(folder)
        self.assertEqual(set(tensors), set(tensorfs.load_file(folder, "dlpack")))

    def test_other_threads_are_left_alone(self):
        found = []
        with tensorfs.patched():
            thread = threading.Thread(target=lambda: found.append(self.is_ours()))
            thread.start()
            thread.join()
            self.assertTrue(self.is_ours())
        self.assertEqual(found, [False])

    def test_other_tasks_are_left_alone(self):
        async def inside(entered, left):
            with tensorfs.patched():
                entered.set()
                await left.wait()
                return self.is_ours()

        async def outside(entered, left):
            await entered.wait()
            found = self.is_ours()
            left.set()
            return found

        async def both():
            entered, left = asyncio.Event(), asyncio.Event()
            return await asyncio.gather(inside(entered, left), outside(entered, left))

        self.assertEqual(asyncio.run(both()), [True, False])

    def test_what_we_do_not_load_is_loaded_by_safetensors(self):
        with tensorfs.patched():
            with self.assertRaisesRegex(safetensors.SafetensorError, "framework nonsense is invalid"):
                safetensors.safe_open(self.file, "nonsense")
            # The error of safetensors, not of tensorfs.
            with self.assertRaisesRegex(safetensors.SafetensorError, "Device cuda:0 is not supported for framework"):
                safetensors.safe_open(self.file, "np", device="cuda:0")

    def test_a_child_made_while_another_thread_enters_a_block_enters_one_too(self):
        from test_workers import in_child

        def inside():
            with tensorfs.patched():
                return self.is_ours()

        # In the child, the lock would be held by a thread that does not exist there.
        with tensorfs._patch._lock:
            self.assertEqual(in_child(inside), "True")

    def test_a_block_that_is_left_in_another_context_ends(self):
        genuine = safetensors.safe_open
        block, elsewhere = tensorfs.patched(), contextvars.copy_context()
        elsewhere.run(block.__enter__)
        self.assertFalse(self.is_ours())
        self.assertTrue(elsewhere.run(self.is_ours))
        block.__exit__(None, None, None)
        self.assertFalse(elsewhere.run(self.is_ours))
        self.assertIs(safetensors.numpy.safe_open, genuine)

    def test_a_task_that_outlives_its_block_is_not_in_that_of_another(self):
        async def outliving(left):
            await left.wait()
            with tensorfs.patched():
                within = self.is_ours()
            return within, self.is_ours()

        async def all_of_it():
            left = asyncio.Event()
            with tensorfs.patched():
                task = asyncio.create_task(outliving(left))
                await asyncio.sleep(0)
            async with contextlib.AsyncExitStack() as stack:
                other = contextvars.copy_context()
                block = tensorfs.patched()
                other.run(block.__enter__)
                stack.callback(block.__exit__, None, None, None)
                left.set()
                return await task

        self.assertEqual(asyncio.run(all_of_it()), (True, False))

    def test_a_module_that_is_unlike_others_is_in_nobodys_way(self):
        class Sealed(types.ModuleType):
            def __setattr__(self, name, value):
                raise AttributeError(name)

        sealed, nameless = Sealed("sealed"), types.ModuleType("nameless")
        del nameless.__dict__["__name__"]
        genuine = sealed.__dict__["safe_open"] = nameless.__dict__["safe_open"] = safetensors.safe_open
        with mock.patch.dict(sys.modules, sealed=sealed, nameless=nameless):
            with tensorfs.patched():
                self.assertTrue(self.is_ours(sealed.safe_open) and self.is_ours(nameless.safe_open))
            self.assertIs(sealed.safe_open, genuine)
            self.assertIs(nameless.safe_open, genuine)
        self.assertIs(safetensors.safe_open, genuine)

    def test_an_error_ends_the_block_as_well(self):
        with self.assertRaises(KeyError), tensorfs.patched():
            raise KeyError
        self.assertFalse(self.is_ours())

    def test_importing_changes_nothing(self):
        code = "import safetensors; before = safetensors.safe_open; import tensorfs; assert safetensors.safe_open is before"
        python(code)

    @needs_torch
    def test_load_model_works(self):
        import torch
        from safetensors.torch import load_model, save_model

        model, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
        save_model(model, str(self.file))
        with tensorfs.patched():
            load_model(other, str(self.file))
        self.assertTrue(torch.equal(model.weight, other.weight))

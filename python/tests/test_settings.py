"""Settings of reading, from the environment and from arguments."""

import numpy as np
from safetensors.numpy import save_file

import tensorfs
from package import TestCase, environment, python


class Settings(TestCase):
    def setUp(self):
        super().setUp()
        self.file = self.tmp / "model.safetensors"
        save_file({"a": np.arange(300_000)}, self.file)

    def load(self, **how):
        np.testing.assert_array_equal(tensorfs.load_file(self.file, "np", **how)["a"], np.arange(300_000))

    def test_good_values_are_taken_from_both(self):
        good = {
            "CHUNK": ("4096", "64k", "1MiB", "16M"),
            "IO_DEPTH": ("1", "64"),
            "PINNED_MAX": ("1M", "2g"),
            "SOURCE": ("auto", "direct", "buffered"),
            "ENGINE": ("auto", "uring", "threads", "cufile"),
            "IO_TIMEOUT": ("0", "1.5", "60"),
        }
        for name, values in good.items():
            for value in values:
                with self.subTest(name=name, value=value):
                    self.load(**{name.lower(): value})
                    with environment(**{f"TENSORFS_{name}": value}):
                        self.load()

    def test_a_bad_value_is_an_error_that_names_it_and_what_it_may_be(self):
        bad = {
            "CHUNK": ("", "big", "1.5M", "-1", "100", "2T"),
            "IO_DEPTH": ("0", "x", "-1", "100000"),
            "PINNED_MAX": ("17", "x"),
            "SOURCE": ("cached",),
            "ENGINE": ("pread",),
            "IO_TIMEOUT": ("soon", "-1", "nan", "inf"),
        }
        for name, values in bad.items():
            for value in values:
                with self.subTest(name=name, value=value):
                    with self.assertRaisesRegex(ValueError, f"{name.lower()}={value}: expected"):
                        self.load(**{name.lower(): value})
                    # An empty variable counts as unset.
                    if value:
                        with environment(**{f"TENSORFS_{name}": value}):
                            with self.assertRaisesRegex(ValueError, f"TENSORFS_{name}={value}: expected"):
                                self.load()

    def test_an_argument_goes_before_the_environment(self):
        with environment(TENSORFS_SOURCE="nonsense", TENSORFS_CHUNK=""):
            self.load(source="buffered")

    def test_loads_with_many_settings_do_not_keep_the_threads_of_all(self):
        code = """
import os, sys, time
import tensorfs

def held():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

for turn in range(8):
    tensorfs.load_file(sys.argv[1], "dlpack", io_timeout=60 + turn, source="direct")
most = held()
for turn in range(40):
    tensorfs.load_file(sys.argv[1], "dlpack", io_timeout=70 + turn, source="direct")
# The threads of dropped loaders end by themselves.
while any(now > 2 * before for now, before in zip(held(), most)):
    time.sleep(0.01)
print("few")
"""
        self.assertEqual(python(code, self.file), "few\n")

    def test_a_device_that_cannot_be_loaded_to_is_refused(self):
        for device, why in (("cuda:0", "pt"), (0, "pt"), ("mps", "not supported"), ("nowhere", "invalid"), ([], "invalid")):
            with self.subTest(device=device), self.assertRaisesRegex(tensorfs.SafetensorError, why):
                tensorfs.safe_open(self.file, "np", device)
        with tensorfs.safe_open(self.file, "np", None) as f:
            self.assertEqual(f.keys(), ["a"])
        with self.assertRaisesRegex(tensorfs.SafetensorError, "framework onnx is invalid"):
            tensorfs.safe_open(self.file, "onnx")

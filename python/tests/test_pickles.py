"""`zero` and `state`: they choose which tensors of pickles of torch are loaded, consolidated, and loaded into existing
memory."""

import numpy as np

import tensorfs
from manifest import by_id
from package import FIXTURES, Mount, TestCase

RUN = FIXTURES / "torch/deepspeed_zero2"
LIGHTNING = FIXTURES / "torch/ckpt_lightning.ckpt"


def dtypes(tensors):
    return {name: tensor.dtype for name, tensor in tensors.items()}


class Zero(TestCase):
    def setUp(self):
        super().setUp()
        self.module = {name: fields["dtype"] for name, fields in by_id("torch_deepspeed_zero2").tensors.items()}
        self.masters = {name: fields["dtype"] for name, fields in by_id("torch_deepspeed_zero2_fp32").tensors.items()}
        self.assertNotEqual(self.module, self.masters)

    def test_a_load_takes_the_weights_of_the_model_or_those_of_the_optimizer(self):
        self.assertEqual(dtypes(tensorfs.load_file(RUN, "dlpack")), self.module)
        self.assertEqual(dtypes(tensorfs.load_file(RUN, "dlpack", zero="module")), self.module)
        self.assertEqual(dtypes(tensorfs.load_file(RUN, "dlpack", zero="fp32")), self.masters)

    def test_consolidate_and_load_into_take_it_too(self):
        out = self.tmp / "masters.safetensors"
        tensorfs.consolidate(RUN, out, zero="fp32")
        whole = tensorfs.load_file(out, "dlpack")
        self.assertEqual(dtypes(whole), self.masters)
        into = {name: np.zeros(tensor.shape, np.float32) for name, tensor in whole.items() if tensor.dtype == "F32"}
        tensorfs.load_into(into, RUN, strict=False, zero="fp32")
        for name, array in into.items():
            self.assertEqual(array.tobytes(), whole[name].tobytes(), name)

    def test_on_a_mount_it_is_that_of_the_mount_unless_it_is_given(self):
        with Mount(RUN, "zero=fp32") as m:
            path = m.path / "model.safetensors"
            self.assertEqual(dtypes(tensorfs.load_file(path, "dlpack")), self.masters)
            self.assertEqual(dtypes(tensorfs.load_file(m.path, "dlpack")), self.masters)
            self.assertEqual(dtypes(tensorfs.load_file(m.path, "dlpack", zero="module")), self.module)

    def test_another_word_is_an_error_that_lists_the_words(self):
        for word, words in (("zero", "module or fp32"), ("state", "none or all")):
            with self.assertRaisesRegex(tensorfs.SafetensorError, f"{word}=other: expected {words}"):
                tensorfs.load_file(RUN, "dlpack", **{word: "other"})
        with self.assertRaisesRegex(TypeError, "zero: expected a str, not int"):
            tensorfs.load_file(RUN, "dlpack", zero=32)


class State(TestCase):
    def test_all_tensors_come_under_their_full_names(self):
        model = tensorfs.load_file(LIGHTNING, "dlpack")
        every = tensorfs.load_file(LIGHTNING, "dlpack", state="all")
        self.assertLess(len(model), len(every))
        for name, tensor in model.items():
            self.assertEqual(every[f"state_dict.{name}"].tobytes(), tensor.tobytes(), name)
        self.assertTrue(any(name.startswith("optimizer_states.") for name in every), list(every))
        out = self.tmp / "all.safetensors"
        tensorfs.consolidate(LIGHTNING, out, state="all")
        self.assertEqual(dtypes(tensorfs.load_file(out, "dlpack")), dtypes(every))

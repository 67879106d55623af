"""Exceptions show names of files and tensors on one line and without terminal commands, although names may contain any
character."""

import unicodedata

import numpy as np

import tensorfs
from checkpoints import write_shard
from package import TestCase

EVIL = "a\nb\r\t\x1b[2J\x9b31m\x7f\u202ec\u2066\u2028\u200b\ufeff"


class Exceptions(TestCase):
    def assert_plain(self, action, tensor=None):
        with self.assertRaises((tensorfs.SafetensorError, OSError)) as caught:
            action()
        text = str(caught.exception)
        self.assertFalse({c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")}, repr(text))
        if tensor is not None:
            self.assertEqual(caught.exception.tensor, tensor)

    def test_exceptions_show_names_escaped_and_attributes_keep_them(self):
        good = self.tmp / f"model {EVIL}.safetensors"
        write_shard(good, [(EVIL, "U8", (4,), b"abcd")])
        opened = tensorfs.safe_open(good, "np")
        self.assertEqual(list(opened.keys()), [EVIL])
        self.assert_plain(lambda: opened.get_tensor(f"no {EVIL}"), f"no {EVIL}")
        self.assert_plain(lambda: opened.get_tensors([f"no {EVIL}"]))
        self.assert_plain(lambda: opened.prefetch({EVIL: slice(0, 99)}))
        self.assert_plain(lambda: tensorfs.load_into({EVIL: np.zeros(3, np.uint8)}, good))
        bad = self.tmp / f"bad {EVIL}.safetensors"
        write_shard(bad, [(EVIL, "U8", (4,), b"abcd")] * 2)
        self.assert_plain(lambda: tensorfs.safe_open(bad, "np"), EVIL)
        self.assert_plain(lambda: tensorfs.safe_open(self.tmp / f"none {EVIL}", "np"))
        self.assert_plain(lambda: tensorfs.safe_open([self.tmp / f"none {EVIL}"], "np"))

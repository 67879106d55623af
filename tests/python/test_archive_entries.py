"""`tensorfs verify` on files of torch.save: each entry of the archive is compared with its CRC-32."""

import re
import shutil
import zipfile
import zlib

import numpy as np

import torch_files
from mounts import FIXTURES, TestCase, tensorfs
from torch_files import Tensor


def all_bytes(folder):
    """The bytes of all files of items in a folder."""
    return b"".join(path.read_bytes() for path in folder.glob("*.distcp"))


class ArchiveEntries(TestCase):
    def file(self, name="model.pt"):
        path = self.tmp / name
        values = {"a": Tensor(np.arange(5000, dtype=np.float32)), "b": Tensor(np.ones(3, np.float32)), "n": 3}
        torch_files.save(path, values)
        return path

    def flip(self, path, entry, byte=0):
        """Changes a bit of an entry."""
        with zipfile.ZipFile(path) as archive:
            (info,) = [info for info in archive.infolist() if info.filename == entry]
        data = bytearray(path.read_bytes())
        header = info.header_offset
        start = header + 30 + sum(int.from_bytes(data[header + at : header + at + 2], "little") for at in (26, 28))
        data[start + byte] ^= 4
        path.write_bytes(data)
        return info.CRC

    def test_all_entries_of_a_good_file_match(self):
        path = self.file()
        outcome = tensorfs("verify", path, "--json")
        self.assert_done(outcome)
        # The pickle, the order of bytes, two storages and the version.
        self.assertEqual(outcome.json()["sets"][0]["archive_entries_compared"], 5)
        outcome = tensorfs("verify", path)
        self.assert_done(outcome)
        self.assertIn("5 entries match their CRC-32", outcome.stdout)

    def test_a_changed_bit_is_told_with_its_entry(self):
        for entry, byte in (("archive/data/0", 0), ("archive/data/0", 19999), ("archive/data/1", 5), ("archive/version", 0)):
            with self.subTest(entry=entry, byte=byte):
                path = self.file()
                crc = self.flip(path, entry, byte)
                self.assert_done(tensorfs("ls", path))
                outcome = tensorfs("verify", path, "--json")
                self.assert_refused(outcome)
                found = outcome.json()["sets"][0]
                self.assertEqual(found["class"], "hash_mismatch")
                self.assertIn(f"`{entry}`", found["error"])
                self.assertIn(f"its directory says {crc:08x}", found["error"])
                self.assertEqual(len(outcome.stderr.splitlines()), 1)

    def test_entries_of_every_file_of_a_set_are_compared(self):
        folder = self.tmp / "run"
        shutil.copytree(FIXTURES / "torch/deepspeed_zero3", folder)
        path = folder / "global_step1/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        with zipfile.ZipFile(path) as archive:
            entry = next(name for name in archive.namelist() if name.endswith("/data/6"))
        self.flip(path, entry, 7)
        outcome = tensorfs("verify", folder)
        self.assert_refused(outcome)
        self.assertIn(path.name, outcome.stderr)
        self.assertIn(f"`{entry}`", outcome.stderr)

    def test_entries_of_every_item_of_a_distributed_checkpoint_are_compared(self):
        step = self.copy(FIXTURES / "torch/dcp_small", "step")
        whole = tensorfs("verify", step, "--json")
        self.assert_done(whole)
        count, changed = whole.json()["sets"][0]["archive_entries_compared"], 0
        for path in sorted(step.glob("*.distcp")):
            data = path.read_bytes()
            # The directory of each item names the data of its tensor, and has its CRC and its length.
            for found in re.finditer(rb"PK\x01\x02.{42}archive/data/0", data, re.DOTALL):
                directory = found.group()
                crc, size = (int.from_bytes(directory[at : at + 4], "little") for at in (16, 24))
                start = next(at for at in range(found.start()) if zlib.crc32(data[at : at + size]) == crc)
                for index in ("none", self.tmp / "index"):
                    with self.subTest(path=path.name, start=start, index=index):
                        path.write_bytes(data[:start] + bytes([data[start] ^ 1]) + data[start + 1 :])
                        outcome = tensorfs("verify", step, "--index-dir", index)
                        self.assert_refused(outcome)
                        self.assertIn(f"step/{path.name}: tensor `", outcome.stderr)
                        self.assertIn(f"entry `archive/data/0` at byte {start} have the CRC32", outcome.stderr)
                        changed += 1
            path.write_bytes(data)
        self.assertEqual((count, changed), (len(re.findall(rb"PK\x01\x02", all_bytes(step))), 12))

    def test_archives_without_crcs_and_files_of_old_torch_have_none_to_compare(self):
        for name in ("zip_crc_off.pt", "legacy_dtypes.pth"):
            outcome = tensorfs("verify", FIXTURES / "torch" / name, "--json")
            self.assert_done(outcome)
            self.assertEqual(outcome.json()["sets"][0]["archive_entries_compared"], 0)

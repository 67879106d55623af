"""Permissions of files that tensorfs writes of a checkpoint: only those who may read all of its shards may read them."""

import os
import stat
import struct

import checkpoints
from mounts import TestCase, needs_root, tensorfs

OTHER_GROUP = 54321


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


class CopyModes(TestCase):
    def setUp(self):
        super().setUp()
        self.source = checkpoints.row_wise(self.tmp / "source", 4)
        self.shards = sorted(self.source.glob("*.safetensors"))
        self.out = self.tmp / "out.safetensors"
        self.set_modes(0o644)

    def set_modes(self, *modes):
        """The last mode is that of all further shards."""
        for at, shard in enumerate(self.shards):
            shard.chmod(modes[min(at, len(modes) - 1)])

    def convert(self, *words, umask=0o022):
        outcome = tensorfs("convert", self.source, self.out, "--to=safetensors", *words, umask=umask)
        self.assert_done(outcome)
        return mode_of(self.out)

    def test_shards_of_one_user_become_a_file_of_that_user(self):
        self.set_modes(0o600)
        self.assertEqual(self.convert(), 0o600)

    def test_each_shard_takes_from_the_mode_and_so_does_the_umask(self):
        for modes, umask, expected in (
            ((0o644,), 0o022, 0o644),
            ((0o644,), 0o002, 0o664),
            ((0o644,), 0o077, 0o600),
            ((0o444,), 0o022, 0o644),
            ((0o644, 0o640), 0o022, 0o640),
            ((0o640, 0o644), 0o027, 0o640),
            ((0o644, 0o644, 0o600, 0o644), 0o022, 0o600),
            ((0o640, 0o604), 0o022, 0o600),
        ):
            with self.subTest(modes=[oct(mode) for mode in modes], umask=oct(umask)):
                self.set_modes(*modes)
                self.out.unlink(missing_ok=True)
                self.assertEqual(oct(self.convert(umask=umask)), oct(expected))

    def test_a_file_that_is_replaced_takes_from_the_mode_too_and_adds_nothing(self):
        for there, shards, expected in (
            (0o644, 0o600, 0o600),
            (0o666, 0o640, 0o660),
            (0o600, 0o644, 0o600),
            (0o640, 0o644, 0o640),
            (0o644, 0o644, 0o644),
            (0o666, 0o644, 0o666),
        ):
            with self.subTest(there=oct(there), shards=oct(shards)):
                self.set_modes(shards)
                self.out.write_text("old")
                self.out.chmod(there)
                self.assertEqual(oct(self.convert("--force")), oct(expected))

    def test_an_empty_umask_opens_nothing(self):
        self.set_modes(0o600)
        self.assertEqual(self.convert(umask=0), 0o600)

    def test_a_manifest_is_as_readable_as_its_shards(self):
        for shards, expected in ((0o600, 0o600), (0o644, 0o644), (0o640, 0o640)):
            self.set_modes(shards)
            self.assert_done(tensorfs("verify", self.source, "--write-manifest", umask=0o022))
            (manifest,) = self.source.glob("*manifest.json")
            self.assertEqual(oct(mode_of(manifest)), oct(expected))
            manifest.unlink()

    def test_a_weight_map_of_consolidate_is_as_readable_as_the_shards_and_the_map_that_it_is_made_of(self):
        numbered = checkpoints.numbered_set(self.tmp / "numbered", 1)
        for number, (source, shards, of_map, umask, expected) in enumerate((
            (self.source, 0o600, 0o644, 0o022, 0o600),
            (self.source, 0o644, 0o644, 0o027, 0o640),
            (numbered, 0o640, 0o644, 0o022, 0o640),
            (numbered, 0o644, 0o600, 0o022, 0o600),
            (numbered, 0o644, 0o644, 0o022, 0o644),
        )):
            with self.subTest(source.name, shards=oct(shards), map=oct(of_map), umask=oct(umask)):
                for file in source.iterdir():
                    file.chmod(of_map if file.suffix == ".json" else shards)
                out = self.tmp / f"written-{number}"
                self.assert_done(tensorfs("consolidate", source, out, umask=umask))
                (written,) = out.glob("*.index.json")
                self.assertEqual(oct(mode_of(written)), oct(expected))

    def test_a_report_is_as_readable_as_the_shards_that_it_describes(self):
        page = self.tmp / "page.html"
        for shards, there, expected in ((0o600, None, 0o600), (0o644, None, 0o644), (0o640, 0o600, 0o600)):
            with self.subTest(shards=oct(shards), there=there):
                self.set_modes(0o644, shards)
                page.unlink(missing_ok=True)
                if there:
                    self.assert_done(tensorfs("report", self.source, "--html", page))
                    page.chmod(there)
                self.assert_done(tensorfs("report", self.source, "--html", page, umask=0o022))
                self.assertEqual(oct(mode_of(page)), oct(expected))

    def test_a_report_of_a_refused_set_is_no_more_readable_than_its_shards(self):
        folder = self.tmp / "tree"
        self.copy(self.source, "tree/good")
        broken = self.copy(self.source, "tree/broken")
        for shard in broken.glob("*.safetensors"):
            shard.chmod(0o600)
        next(broken.glob("*.safetensors")).unlink()
        tensorfs("report", folder, "--html", self.tmp / "page.html", umask=0o022)
        self.assertEqual(oct(mode_of(self.tmp / "page.html")), oct(0o600))

    @needs_root
    def test_the_group_of_the_file_gets_in_only_if_it_is_that_of_the_shards(self):
        self.set_modes(0o640)
        for shard in self.shards:
            os.chown(shard, -1, OTHER_GROUP)
        self.assertEqual(self.convert(), 0o600)
        # A folder that hands its group down gives the file that of the shards.
        folder = self.tmp / "shared"
        folder.mkdir()
        os.chown(folder, -1, OTHER_GROUP)
        folder.chmod(0o2775)
        self.out = folder / "out.safetensors"
        self.assertEqual(self.convert(), 0o640)
        self.assertEqual(self.out.stat().st_gid, OTHER_GROUP)

    @needs_root
    def test_a_replaced_file_of_another_group_lets_only_its_owner_in(self):
        self.out.write_text("old")
        self.out.chmod(0o640)
        os.chown(self.out, -1, OTHER_GROUP)
        self.assertEqual(self.convert("--force"), 0o600)

    def test_a_shard_that_an_acl_opens_to_one_user_is_not_opened_to_its_group(self):
        # Version 2; owner rw, user 12345 r, group none, mask r, others none.
        entries = [(1, 6, 2**32 - 1), (2, 4, 12345), (4, 0, 2**32 - 1), (16, 4, 2**32 - 1), (32, 0, 2**32 - 1)]
        acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
        try:
            os.setxattr(self.shards[1], "system.posix_acl_access", acl)
        except OSError as e:
            self.skipTest(f"no ACLs here: {e}")
        self.assertEqual(mode_of(self.shards[1]), 0o640)
        self.assertEqual(self.convert(), 0o600)

"""Symbolic links of a tree: a farm of them takes nothing from its neighbours, skipped ones are counted with a reason, and
folders that become links show nothing from outside."""

import contextlib
import os
import re
import sys
import time
import unittest
from pathlib import Path

import checkpoints
from checkpoints import numbered_set
from mounts import BIN, Mount, MountFailed, TestCase, daemon_of, read_or_none, run_measured, tensorfs

FILE = "model.safetensors"
NOTE = "TENSORFS-ERROR.txt"
NOTICED_SECONDS = 3
MEGABYTE = 1 << 20


def cross_linked(folder, width):
    """Folders that each link to all others: the paths through them are as many as their orders."""
    for number in range(width):
        here = folder / f"d{number:02}"
        here.mkdir(parents=True)
        (here / "notes.txt").write_text("x")
        for other in range(width):
            if other != number:
                (here / f"to{other:02}").symlink_to(f"../d{other:02}")


def linked_levels(folder, levels, width):
    """Each folder links to two of the next level: 2^levels paths from each of the first."""
    for level in range(levels):
        for number in range(width):
            here = folder / f"n{level:02}-{number:02}"
            here.mkdir(parents=True)
            for link in (0, 1) if level + 1 < levels else ():
                (here / f"l{link}").symlink_to(f"../n{level + 1:02}-{(number + link) % width:02}")


def many_links(folder, count):
    """One folder, and very many links to it."""
    (folder / "target").mkdir(parents=True)
    (folder / "target/notes.txt").write_text("x")
    for number in range(count):
        (folder / f"link{number:06}").symlink_to("target")


def links_up(folder, width):
    """Folders that link to the folder that they lie in, and to each other."""
    for number in range(width):
        here = folder / f"u{number:02}/inner"
        here.mkdir(parents=True)
        for other in range(width):
            (here / f"up{other:02}").symlink_to(f"../../u{other:02}")
        (here / "top").symlink_to("../..")


def wide_links(folder, files, links):
    """Links to one folder of many files: hundreds of thousands of entries for a few links."""
    (folder / "wide").mkdir(parents=True)
    for number in range(files):
        (folder / f"wide/{number}").touch()
    for number in range(links):
        (folder / f"link{number:04}").symlink_to("wide")


class Farms(TestCase):
    FARMS = {
        "each to all others": lambda folder: cross_linked(folder, 14),
        "two of the next level": lambda folder: linked_levels(folder, 17, 12),
        "very many to one": lambda folder: many_links(folder, 21_000),
        "up and across": lambda folder: links_up(folder, 12),
        "to a folder of many files": lambda folder: wide_links(folder, 2000, 600),
    }

    def neighbours(self, top):
        """Checkpoints before and after the farm, and one that is reached by a link."""
        self.wholes = {}
        for folder, seed in (("aaa/model", 1), ("zzz/model", 2)):
            self.wholes[folder] = checkpoints.hf_whole(numbered_set(top / folder, seed))
        (top / "zzz/latest").symlink_to("model")
        self.wholes["zzz/latest"] = self.wholes["zzz/model"]

    def assert_neighbours(self, path):
        for folder, whole in self.wholes.items():
            self.assertTrue((path / folder / FILE).read_bytes() == whole, folder)
            self.assertFalse((path / folder / NOTE).exists(), folder)

    # The farm of one made the whole tree refused.
    def test_a_farm_of_links_in_a_folder_leaves_the_neighbours(self):
        for what, plant in self.FARMS.items():
            with self.subTest(what):
                top = self.tmp / re.sub(r"\W", "-", what)
                self.neighbours(top)
                plant(top / "tenants/mallory/farm")
                # A link to the farm keeps its owner's own files.
                (top / "aaa/shared").symlink_to("../tenants/mallory/farm")
                numbered_set(top / "tenants/mallory/model", 7)
                numbered_set(top / "tenants/alice", 5)
                with Mount(top) as m:
                    self.assert_neighbours(m.path)
                    self.assertTrue((m.path / "tenants/alice" / FILE).exists())
                    self.assertTrue((m.path / "tenants/mallory/model" / FILE).exists())
                    self.assertIn("too many", (m.path / "tenants/mallory/farm" / NOTE).read_text())
                    self.assertFalse((m.path / "tenants" / NOTE).exists())
                    self.assertRegex(m.log(), r"mallory/farm/.* not shown: .* too many")

    # The source itself is the farm.
    def test_a_farm_of_links_in_the_source_itself_leaves_the_neighbours(self):
        for what, plant in self.FARMS.items():
            with self.subTest(what):
                top = self.tmp / re.sub(r"\W", "-", what)
                self.neighbours(top)
                plant(top)
                with Mount(top) as m:
                    self.assert_neighbours(m.path)
                    self.assertIn("too many", (m.path / NOTE).read_text())

    def test_ls_and_verify_see_the_neighbours_and_say_what_they_skip(self):
        top = self.tmp / "tree"
        self.neighbours(top)
        cross_linked(top / "mallory", 14)
        for command in ("ls", "verify"):
            outcome, peak = run_measured(BIN, command, top, "--json")
            # A folder that was not looked at is not verified.
            self.assertEqual((outcome.code, outcome.json()["ok"]), (1, False) if command == "verify" else (0, True))
            found = {s["directory"] for s in outcome.json()["sets"]}
            self.assertLessEqual(set(self.wholes), found)
            self.assertIn("too many", " ".join(outcome.json()["notes"]))
            self.assertLess(peak, 300 * MEGABYTE, command)

    # A log must not be flooded by whoever makes many broken links.
    def test_very_many_broken_links_are_counted_and_not_listed(self):
        top = numbered_set(self.tmp / "tree", 1)
        for number in range(20_000):
            (top / f"broken{number:06}").symlink_to("nowhere")
        with Mount(top) as m:
            self.assertTrue((m.path / FILE).exists())
            self.assertLess(len(m.log().splitlines()), 200)
            self.assertIn("20000 links lead nowhere", m.log())


class Skipped(TestCase):
    def source(self):
        source = numbered_set(self.tmp / "model", 1)
        (self.tmp / "outside").mkdir()
        for shard in sorted(source.glob("*.safetensors")):
            shard.rename(self.tmp / "outside" / shard.name)
            shard.symlink_to(self.tmp / "outside" / shard.name)
        return source

    # The commands show what a mount would show; a user was told nothing, or only that there is nothing.
    def test_commands_count_the_links_that_they_skip_and_say_what_to_do(self):
        source = self.source()
        count = len(list(source.glob("*.safetensors")))
        for command in ("ls", "inspect", "verify", "index"):
            with self.subTest(command):
                outcome = tensorfs(command, source)
                self.assert_refused(outcome)
                self.assertIn(f"{count} links lead out of the source", outcome.stderr)
                self.assertIn("-o follow=DIR", outcome.stderr)
                self.assert_done(tensorfs(command, source, "-o", f"follow={self.tmp / 'outside'}"))

    def test_a_mount_counts_the_links_that_it_skips_and_says_what_to_do(self):
        source = self.source()
        with self.assertRaises(MountFailed) as caught, Mount(source):
            pass
        self.assertIn("out of the source", caught.exception.stderr)
        self.assertIn("-o follow=DIR", caught.exception.stderr)
        with Mount(source, f"follow={self.tmp / 'outside'}") as m:
            self.assertTrue((m.path / FILE).exists())

    # A name of a shard that leads nowhere was left out of a set of DCP shards, which then looked smaller.
    def test_a_dcp_shard_that_is_a_broken_link_refuses_its_set(self):
        source = self.tmp / "dcp"
        source.mkdir()
        for rank in range(3):
            (source / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors").symlink_to("nowhere")
        outcome = tensorfs("verify", source, "--json")
        self.assert_refused(outcome)
        self.assertEqual(outcome.json()["class"], "shard_missing")
        self.assertIn("leads nowhere", outcome.json()["error"])

    def test_a_fifo_and_a_cycle_are_named_with_their_reason(self):
        for name, make, reason in (
            ("fifo", lambda path: os.mkfifo(path), "neither a file nor a folder"),
            ("loop", lambda path: path.symlink_to(path.name), "leads back to itself"),
            ("null", lambda path: path.symlink_to("/dev/null"), "out of the source"),
        ):
            with self.subTest(name):
                source = self.tmp / name
                source.mkdir()
                make(source / FILE)
                outcome = tensorfs("verify", source)
                self.assert_refused(outcome)
                self.assertIn(FILE, outcome.stderr)
                self.assertIn(reason, outcome.stderr)


class SwappedFolders(TestCase):
    def setUp(self):
        super().setUp()
        self.source = self.tmp / "source"
        self.folder = numbered_set(self.source / "d", 1)
        self.whole = checkpoints.hf_whole(self.folder)
        self.outside = numbered_set(self.tmp / "outside", 2)
        for name in ("notes.txt", "fresh.txt"):
            (self.folder / name).write_text("inside")
            (self.outside / name).write_text("secret")
        (self.outside / "only.txt").write_text("secret")
        os.utime(self.outside / "notes.txt", ns=(0, (self.folder / "notes.txt").stat().st_mtime_ns))

    def swap(self):
        self.folder.rename(self.source / "d.old")
        self.folder.symlink_to(self.outside)

    def assert_nothing_from_outside(self, path, seconds):
        """Looks again and again, because caches end after a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for name in ("notes.txt", "fresh.txt", "only.txt"):
                self.assertIn(read_or_none(path / "d" / name), (None, b"inside"), name)
            found = read_or_none(path / "d" / FILE)
            self.assertTrue(found in (None, self.whole), "weights from outside")
            with contextlib.suppress(OSError):
                self.assertNotIn("only.txt", os.listdir(path / "d"))
            time.sleep(0.1)

    # A folder was swapped for a link to another one after the mount, and its files were opened by their
    # paths: the mount, often root's, showed files of the same name from anywhere.
    def test_a_folder_swapped_for_a_link_shows_nothing_from_outside(self):
        numbered_set(self.source / "other", 3)
        with Mount(self.source) as m:
            self.assertEqual((m.path / "d/notes.txt").read_text(), "inside")
            self.assert_same((m.path / "d" / FILE).read_bytes(), self.whole)
            self.swap()
            self.assert_nothing_from_outside(m.path, NOTICED_SECONDS)
            self.assertTrue(m.alive(), m.log())

    # Nobody had looked into the folder: its weights were first opened after the swap, when the path led
    # outside.
    def test_a_folder_swapped_before_the_first_look_shows_nothing_from_outside(self):
        numbered_set(self.source / "a", 3)
        with Mount(self.source) as m:
            self.swap()
            self.assert_nothing_from_outside(m.path, 1.5)
            self.assertTrue(m.alive(), m.log())

    # A folder above was swapped, so that the last component of the path was genuine and only one
    # in the middle was the link.
    def test_a_folder_swapped_further_up_shows_nothing_from_outside(self):
        top = self.tmp / "top"
        numbered_set(top / "a", 3)
        (top / "up").mkdir()
        self.source.rename(top / "up/source")
        far = self.tmp / "far"
        (far / "source").mkdir(parents=True)
        self.outside.rename(far / "source/d")
        with Mount(top) as m:
            (top / "up").rename(top / "up.old")
            (top / "up").symlink_to(far)
            self.assert_nothing_from_outside(m.path / "up/source", 1.5)

    # A followed link led to where the mount was to stand, so that the daemon looked into itself
    # and waited for its own answer.
    def test_a_source_that_links_into_the_mount_point_is_refused(self):
        source = numbered_set(self.tmp / "n/src", 1)
        place = self.mount_point("n/mnt")
        (place / "below").mkdir()
        for target in ("../mnt", "../mnt/below"):
            (source / "link").symlink_to(target)
            outcome = tensorfs("mount", source, place, "-o", f"follow={self.tmp / 'n'}")
            self.assert_refused(outcome)
            self.assert_not_mounted(place)
            (source / "link").unlink()


class ManyLinks(TestCase):
    LEVELS, WIDTH = 17, 12

    def tree(self):
        """Each folder links to two of the next level: 200 folders, and 2^17 paths from each of the first level."""
        source = numbered_set(self.tmp / "tree/model", 1).parent
        for level in range(self.LEVELS):
            for number in range(self.WIDTH):
                folder = source / f"n{level:02}-{number:02}"
                folder.mkdir()
                (folder / "notes.txt").write_text("x")
                for link in (0, 1) if level + 1 < self.LEVELS else ():
                    (folder / f"l{link}").symlink_to(f"../n{level + 1:02}-{(number + link) % self.WIDTH:02}")
        return source

    # A few folders that link to each other have as many paths as leaves have a tree: the scan took
    # minutes and all memory.
    def test_folders_linked_to_each_other_are_scanned_soon_or_refused(self):
        source = self.tree()
        for command in ("verify", "ls"):
            outcome, peak = run_measured(BIN, command, source)
            self.assertIn(outcome.code, (0, 1), outcome.stderr)
            self.assertLess(outcome.seconds, 5, command)
            self.assertLess(peak, 300 * MEGABYTE, command)

    # The same for a mount, which keeps what it has scanned.
    # It may refuse the tree, but not hang.
    def test_folders_linked_to_each_other_are_mounted_soon_or_refused(self):
        source, place = self.tree(), self.mount_point()
        outcome = tensorfs("mount", source, place)
        self.assertIn(outcome.code, (0, 1), outcome.stderr)
        self.assertLess(outcome.seconds, 5)
        if outcome.code == 0:
            status = Path(f"/proc/{daemon_of(place)}/status").read_text()
            peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
            self.assertLess(peak, 300 * MEGABYTE)
            self.assertTrue((place / "model" / FILE).exists())
            self.assert_done(tensorfs("umount", place))


if __name__ == "__main__":
    sys.exit(unittest.main())

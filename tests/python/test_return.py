"""A source that is away for a moment: what is there then is shown at the next look, with `watch=` and without it."""

import contextlib
import os
import shutil

import checkpoints
from checkpoints import dcp_name
from faults import status_of
from mounts import HANGS, Mount, TestCase, detach, needs_root, read_or_none, run, tensorfs, wait_until

FILE = "model.safetensors"
MODES = ((), ("watch=auto",))


def names_in(path):
    """The names in a folder of the mount, None if it is not there."""
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return None


class Return(TestCase):
    def setUp(self):
        super().setUp()
        self.old, self.new = self.tmp / "old", self.tmp / "new"
        # The new checkpoint has more shards, and other files.
        checkpoints.numbered_set(self.old, 1)
        checkpoints.numbered_set(self.new, 2, total=4)
        (self.new / "tokenizer.json").write_text("{}")
        self.whole, self.other = checkpoints.hf_whole(self.old), checkpoints.hf_whole(self.new)

    @contextlib.contextmanager
    def mounted(self, mode):
        """The mount of a copy of the old checkpoint."""
        with self.subTest(mode=mode):
            current = self.tmp / f"current{len(mode)}"
            shutil.copytree(self.old, current)
            with Mount(current, *mode) as m:
                self.assert_shown(m.path, self.whole)
                yield current, m

    def assert_shown(self, folder, whole, names=None):
        wait_until(lambda: read_or_none(folder / FILE) == whole, HANGS, "the bytes are shown")
        if names is not None:
            wait_until(lambda: names_in(folder) == sorted(names), HANGS, f"the names are {names}")

    def assert_gone(self, folder):
        wait_until(lambda: not names_in(folder), HANGS, "the folder is empty")
        self.assertIsNone(read_or_none(folder / FILE))

    def names_of(self, folder):
        return [name for name in os.listdir(folder) if not name.startswith("model-0")] + [FILE]

    def sets_of(self, m):
        return status_of(m)[0]["checkpoints"]

    def test_a_checkpoint_that_is_removed_and_copied_anew_is_shown_with_all_its_files(self):
        for mode in MODES:
            with self.mounted(mode) as (current, m):
                for _ in range(2):
                    for file in current.iterdir():
                        file.unlink()
                    self.assert_gone(m.path)
                    self.assertEqual(self.sets_of(m)["shown"], 0)
                    self.assertEqual([one["name"] for one in self.sets_of(m)["absent"]], [FILE])
                    # A look after each file, in both orders: weights first, and last.
                    for file in sorted(self.new.iterdir(), reverse=True):
                        shutil.copy(file, current)
                        self.assertIn(read_or_none(m.path / FILE), (None, self.other))
                    self.assert_shown(m.path, self.other, self.names_of(self.new))
                    self.assertEqual((self.sets_of(m)["shown"], self.sets_of(m)["absent"]), (1, []))

    def test_a_folder_of_a_tree_that_is_removed_comes_back_also_without_a_look_in_it(self):
        for mode in MODES:
            with self.subTest(mode=mode):
                tree = self.tmp / f"tree{len(mode)}"
                shutil.copytree(self.old, tree / "a")
                shutil.copytree(self.old, tree / "b")
                with Mount(tree, *mode) as m:
                    self.assert_shown(m.path / "a", self.whole)
                    shutil.rmtree(tree / "a")
                    wait_until(lambda: names_in(m.path) == ["b"], HANGS, "the folder is gone")
                    self.assertIsNone(read_or_none(m.path / "a" / FILE))
                    (tree / "a").mkdir()
                    for file in sorted(self.new.iterdir()):
                        shutil.copy(file, tree / "a")
                        names_in(m.path / "a")
                    self.assert_shown(m.path / "a", self.other, self.names_of(self.new))
                    self.assert_shown(m.path / "b", self.whole)
                    # Another folder takes its place.
                    (tree / "b").rename(tree.parent / f"away{len(mode)}")
                    shutil.copytree(self.new, tree / "b")
                    self.assert_shown(m.path / "b", self.other, self.names_of(self.new))

    def test_a_single_file_that_is_removed_and_written_anew_is_shown(self):
        for mode in MODES:
            with self.subTest(mode=mode):
                file = self.tmp / f"one{len(mode)}" / FILE
                file.parent.mkdir()
                checkpoints.write_one(file, "w", 1)
                with Mount(file, *mode) as m:
                    self.assert_shown(m.path, file.read_bytes())
                    file.unlink()
                    self.assert_gone(m.path)
                    checkpoints.write_one(self.tmp / "next", "w", 2)
                    (self.tmp / "next").rename(file)
                    self.assert_shown(m.path, file.read_bytes(), [FILE])
                    file.parent.rename(self.tmp / "elsewhere")
                    self.assert_gone(m.path) if not mode else read_or_none(m.path / FILE)
                    (self.tmp / "elsewhere").rename(file.parent)
                    self.assert_shown(m.path, file.read_bytes(), [FILE])

    def test_a_source_that_is_moved_away_and_back_is_shown_and_the_status_says_where_it_is_missing(self):
        for mode in MODES:
            with self.subTest(mode=mode):
                above = self.tmp / f"above{len(mode)}"
                shutil.copytree(self.old, above / "source")
                with Mount(above / "source", *mode) as m:
                    self.assert_shown(m.path, self.whole)
                    # The times of the source itself do not change.
                    above.rename(self.tmp / f"away{len(mode)}")
                    wait_until(lambda: read_or_none(m.path / FILE) is None, HANGS, "the file is gone")
                    wait_until(lambda: not (m.path / "config.json").exists(), HANGS, "all files are gone")
                    said = f"{above / 'source'}: cannot read: No such file"
                    wait_until(lambda: said in str(self.sets_of(m)["source"]), HANGS, "the status says so")
                    self.assertIn(said, tensorfs("status", m.path).stdout)
                    (self.tmp / f"away{len(mode)}").rename(above)
                    self.assert_shown(m.path, self.whole, self.names_of(self.old))
                    wait_until(lambda: self.sets_of(m)["source"] is None, HANGS, "the status says so")

    @needs_root
    def test_a_file_system_that_is_unmounted_and_mounted_again_is_shown(self):
        for mode in MODES:
            with self.subTest(mode=mode):
                source = self.tmp / f"disk{len(mode)}"
                source.mkdir()
                self.assert_done(run("mount", "-t", "tmpfs", "tmpfs", source))
                self.addCleanup(detach, source)
                shutil.copytree(self.old, source, dirs_exist_ok=True)
                with Mount(source, *mode) as m:
                    self.assert_shown(m.path, self.whole)
                    self.assert_done(run("umount", "-l", source))
                    self.assert_gone(m.path)
                    self.assert_done(run("mount", "-t", "tmpfs", "tmpfs", source))
                    self.assertIsNone(read_or_none(m.path / FILE))
                    shutil.copytree(self.new, source, dirs_exist_ok=True)
                    self.assert_shown(m.path, self.other, self.names_of(self.new))

    def test_a_source_that_is_replaced_by_another_folder_is_shown(self):
        for mode in MODES:
            with self.mounted(mode) as (current, m):
                current.rename(self.tmp / f"away{len(mode)}")
                shutil.copytree(self.new, current)
                self.assert_shown(m.path, self.other, self.names_of(self.new))
                shutil.rmtree(self.tmp / f"away{len(mode)}")

    def test_a_link_to_the_source_is_followed_once_the_old_folder_is_gone(self):
        for mode in MODES:
            with self.subTest(mode=mode):
                shelf = self.tmp / f"shelf{len(mode)}"
                shutil.copytree(self.old, shelf / "v1")
                shutil.copytree(self.new, shelf / "v2")
                (shelf / "current").symlink_to("v1")
                with Mount(shelf / "current", *mode) as m, open(m.path / FILE, "rb") as held:
                    self.assert_shown(m.path, self.whole)
                    (shelf / "next").symlink_to("v2")
                    (shelf / "next").rename(shelf / "current")
                    # The old version is shown until it is removed.
                    self.assertEqual(read_or_none(m.path / FILE), self.whole)
                    shutil.rmtree(shelf / "v1")
                    self.assert_shown(m.path, self.other, self.names_of(self.new))
                    self.assert_same(held.read(), self.whole)
                    m.wait_for_log("the mount shows it now")

    # The old names were looked for, and "not a regular file" was the reason.
    def test_a_model_of_a_hub_cache_that_comes_back_with_other_shards_is_shown(self):
        models = self.tmp / "models"
        shutil.copytree(self.old, models / "org/one")
        shutil.copytree(self.old, models / "org/two")
        cached = checkpoints.hub_cache(models / "models--org--three", self.old)
        with Mount(models, "layout=hub") as m:
            [one] = (m.path / "models--org--one/snapshots").iterdir()
            three = m.path / "models--org--three/snapshots" / cached.name
            for shown in (one, three):
                self.assert_shown(shown, self.whole)
            with open(one / FILE, "rb") as held:
                for file in (models / "org/one").iterdir():
                    file.unlink()
                self.assert_gone(one)
                for file in sorted(self.new.iterdir(), reverse=True):
                    shutil.copy(file, models / "org/one")
                    self.assertIn(read_or_none(one / FILE), (None, self.other))
                self.assert_shown(one, self.other, self.names_of(self.new))
                self.assert_same(held.read(), self.whole)
            # The whole folder is away, and another one comes.
            shutil.rmtree(models / "org/one")
            shutil.rmtree(cached.parents[1])
            self.assert_gone(one)
            self.assert_gone(three)
            self.assertIsNone(self.sets_of(m)["source"])
            shutil.copytree(self.old, models / "org/one")
            self.assertEqual(checkpoints.hub_cache(cached.parents[1], self.new).name, cached.name)
            self.assert_shown(one, self.whole, self.names_of(self.old))
            self.assert_shown(three, self.other, self.names_of(self.new))
            [two] = (m.path / "models--org--two/snapshots").iterdir()
            self.assert_shown(two, self.whole)
            # Other models come at the next mount.
            shutil.copytree(self.old, models / "org/late")
            self.assertEqual(len(names_in(m.path)), 3)

    def test_a_source_of_a_hub_cache_behind_a_link_is_followed_once_it_is_gone(self):
        shelf = self.tmp / "shelf"
        shutil.copytree(self.old, shelf / "v1/one")
        shutil.copytree(self.new, shelf / "v2/one")
        (shelf / "current").symlink_to("v1")
        with Mount(shelf / "current", "layout=hub") as m:
            [one] = (m.path / "models--one/snapshots").iterdir()
            self.assert_shown(one, self.whole)
            (shelf / "next").symlink_to("v2")
            (shelf / "next").rename(shelf / "current")
            self.assert_shown(one, self.whole)
            shutil.rmtree(shelf / "v1")
            self.assert_shown(one, self.other, self.names_of(self.new))

    # The mount showed the folders that the links had led to.
    def test_a_link_to_a_folder_that_is_removed_or_switched_is_noticed(self):
        for mode in MODES:
            with self.subTest(mode=mode):
                tree = self.tmp / f"links{len(mode)}"
                shutil.copytree(self.old, tree / "v1")
                shutil.copytree(self.new, tree / "v2")
                for name, target in (("current", "v1"), ("latest", "current"), ("last", "v1")):
                    (tree / name).symlink_to(target)
                with Mount(tree, *mode) as m, open(m.path / "current" / FILE, "rb") as held:
                    for name in ("current", "latest", "last"):
                        self.assert_shown(m.path / name, self.whole)
                    (tree / "next").symlink_to("v2")
                    (tree / "next").rename(tree / "current")
                    for name in ("current", "latest"):
                        self.assert_shown(m.path / name, self.other, self.names_of(self.new))
                    (tree / "last").unlink()
                    wait_until(lambda: names_in(m.path) == ["current", "latest", "v1", "v2"], HANGS, "the link is gone")
                    # The kernel hears of it after the listing.
                    wait_until(lambda: read_or_none(m.path / "last" / FILE) is None, HANGS, "the file is gone")
                    (tree / "last").symlink_to("v2")
                    self.assert_shown(m.path / "last", self.other, self.names_of(self.new))
                    self.assert_same(held.read(), self.whole)
                    self.assert_shown(m.path / "v1", self.whole)

    def test_a_link_to_a_file_that_is_removed_or_switched_is_noticed(self):
        for mode in MODES:
            with self.subTest(mode=mode):
                folder = self.tmp / f"files{len(mode)}"
                (folder / "kept").mkdir(parents=True)
                for number in (1, 2):
                    checkpoints.write_one(folder / f"kept/{number}.bin", "w", number)
                    (folder / f"kept/{number}.json").write_text(str(number))
                wanted = [(folder / f"kept/{number}.bin").read_bytes() for number in (1, 2)]
                (folder / FILE).symlink_to("kept/1.bin")
                (folder / "config.json").symlink_to("kept/1.json")
                with Mount(folder, *mode) as m:
                    self.assert_shown(m.path, wanted[0])
                    self.assertEqual((m.path / "config.json").read_text(), "1")
                    for name, end in ((FILE, "bin"), ("config.json", "json")):
                        (folder / "next").symlink_to(f"kept/2.{end}")
                        (folder / "next").rename(folder / name)
                    self.assert_shown(m.path, wanted[1])
                    wait_until(lambda: read_or_none(m.path / "config.json") == b"2", HANGS, "the other file")
                    for name in (FILE, "config.json"):
                        (folder / name).unlink()
                    wait_until(lambda: names_in(m.path) == ["kept"], HANGS, "the links are gone")

    def test_rank_shards_that_come_back_one_by_one_are_never_shown_as_a_smaller_tensor(self):
        source, ranks = self.tmp / "ranks", self.tmp / "saved"
        checkpoints.row_wise(ranks, ranks=4)
        shutil.copytree(ranks, source)
        with Mount(source) as m:
            whole = (m.path / FILE).read_bytes()
            for shard in source.iterdir():
                shard.unlink()
            self.assert_gone(m.path)
            for rank in range(1, 5):
                self.assertIsNone(read_or_none(m.path / FILE))
                shutil.copy(ranks / dcp_name(rank), source)
            self.assert_shown(m.path, whole)

    def test_a_file_of_its_full_length_that_is_still_written_is_not_shown(self):
        source = self.tmp / "written"
        source.mkdir()
        checkpoints.write_one(source / FILE, "w", 1)
        data = (source / FILE).read_bytes()
        with Mount(source) as m:
            self.assert_shown(m.path, data)
            (source / FILE).unlink()
            self.assert_gone(m.path)
            with open(source / FILE, "wb") as file:
                file.write(data[: len(data) // 2])
                file.truncate(len(data))
                file.flush()
                wait_until(lambda: names_in(m.path) and self.sets_of(m)["refused"], HANGS, "it is refused")
                self.assertIsNone(read_or_none(m.path / FILE))
                self.assertIn("still being written", self.sets_of(m)["refused"][0]["why"])
                file.write(data[len(data) // 2 :])
            self.assert_shown(m.path, data, [FILE])

    def test_an_empty_folder_that_nobody_changes_is_not_listed_again(self):
        current = self.copy(self.old, "counted")
        other = current / "sub"
        other.mkdir()
        with Mount(current) as m:
            self.assert_shown(m.path, self.whole)
            for file in [file for file in current.iterdir() if file.is_file()]:
                file.unlink()
            wait_until(lambda: read_or_none(m.path / FILE) is None, HANGS, "the file is gone")
            for path in (current, other):
                os.utime(path, (0, 0))
            before = self.sets_of(m)["looks"]
            for number in range(200):
                self.assertFalse((m.path / f"nothing{number}").exists())
            # Changes of the last two seconds may share their time with later ones.
            wait_until(lambda: self.rests(m), HANGS, "looks do not list the folder again")
            self.assertLess(self.sets_of(m)["looks"] - before, 10_000)

    def rests(self, m):
        before = self.sets_of(m)["looks"]
        for number in range(20):
            (m.path / f"nothing{number}").exists()
        return status_of(m)[0]["checkpoints"]["looks"] == before

    def test_the_commands_say_what_the_mount_shows(self):
        for mode in MODES:
            with self.mounted(mode) as (current, m):
                away = self.tmp / f"away{len(mode)}"
                current.rename(away)
                wait_until(lambda: read_or_none(m.path / FILE) is None, HANGS, "the file is gone")
                outcome = tensorfs("ls", m.path)
                self.assertEqual(outcome.code, 1, outcome.stdout)
                self.assertIn(f"{current}: cannot read: No such file or directory", outcome.stderr)
                away.rename(current)
                self.assert_shown(m.path, self.whole)
                self.assert_done(tensorfs("ls", m.path))
                for file in current.iterdir():
                    file.unlink()
                self.assert_gone(m.path)
                outcome = tensorfs("ls", m.path)
                self.assertIn("is not in the source any more", outcome.stderr)

    def test_rank_shards_that_the_mount_refuses_are_not_read_behind_it(self):
        source = self.tmp / "fewer"
        checkpoints.row_wise(source, ranks=3)
        with Mount(source) as m:
            whole = (m.path / FILE).read_bytes()
            (source / dcp_name(3)).rename(self.tmp / "gone")
            wait_until(lambda: read_or_none(m.path / FILE) is None, HANGS, "the set is refused")
            outcome = tensorfs("ls", m.path)
            self.assertEqual(outcome.code, 1, outcome.stdout)
            self.assertIn("it had 3 before", outcome.stderr)
            (self.tmp / "gone").rename(source / dcp_name(3))
            self.assert_shown(m.path, whole)
            self.assert_done(tensorfs("ls", m.path))

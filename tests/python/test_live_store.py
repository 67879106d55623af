"""A store that changes while it is mounted with `watch=`: checkpoints come once they are whole, change and go."""

import contextlib
import os
import shutil
import threading
import time

import checkpoints
import oracle
from faults import FaultFs, status_of, values_of, without_inotify
from mounts import HANGS, Child, Mount, TestCase, detach, needs_root, run, wait_until
from tensorizer_files import Stored, file_of

ERROR_FILE = "TENSORFS-ERROR.txt"

# Renames of a folder and of a link, as fast as it goes.
RENAMER = """
import os, sys
store = sys.argv[1]
os.chdir(store)
print("ready", flush=True)
count = 0
os.set_blocking(0, False)
while sys.stdin.readline() == "":
    for _ in range(200):
        os.rename("a", "b")
        os.rename("b", "a")
        os.symlink("v1" if count % 2 else "v2", "next")
        os.rename("next", "current")
        os.rename("turns", "turned")
        open("turns", "w").close()
        os.remove("turns")
        os.rename("turned", "turns")
        count += 1
print(count, flush=True)
"""


class Store(TestCase):
    options = ("watch=auto",)

    def setUp(self):
        super().setUp()
        self.store = self.tmp / "store"
        self.store.mkdir()

    def mounted(self, *options, **popen):
        m = self.enter(Mount(self.store, *(options or self.options), **popen))
        self.mount = m.path
        return m

    def made(self, name, seed=1, make=checkpoints.hf_set, **kwargs):
        """A checkpoint beside the store, and the bytes that a mount shows for it."""
        folder = self.tmp / "made" / name
        make(folder, **({"seed": seed, "megabytes": 1} if make is checkpoints.hf_set else kwargs))
        return folder, checkpoints.hf_whole(folder)

    def shown(self, path):
        """The bytes of a file of the mount, None if it is not there now."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return (self.mount / path).read_bytes()
        return None

    def wait_for(self, path, data):
        wait_until(lambda: self.shown(path) == data, HANGS, f"{path} is shown with its bytes")

    def wait_for_names(self, names, folder="."):
        def found():
            with contextlib.suppress(FileNotFoundError):
                return sorted(os.listdir(self.mount / folder)) == sorted(names)
            return False

        wait_until(found, HANGS, f"{folder} shows {names}")


class Appearing(Store):
    def test_a_store_may_be_empty_at_first(self):
        self.mounted()
        self.assertEqual(os.listdir(self.mount), [])
        folder, whole = self.made("model")
        folder.rename(self.store / "model")
        self.wait_for("model/model.safetensors", whole)
        self.assertNotIn(ERROR_FILE, os.listdir(self.mount / "model"))

    @needs_root
    def test_a_file_system_that_is_mounted_on_the_store_later_is_shown(self):
        folder, whole = self.made("model")
        self.mounted()
        self.assertEqual(os.listdir(self.mount), [])
        self.assert_done(run("mount", "--bind", folder.parent, self.store))
        self.addCleanup(detach, self.store)
        self.wait_for("model/model.safetensors", whole)

    def test_a_folder_that_is_renamed_into_the_store_and_out_of_it_comes_and_goes(self):
        first, whole = self.made("first")
        first.rename(self.store / "first")
        self.mounted()
        self.assertEqual(self.shown("first/model.safetensors"), whole)
        second, other = self.made("second", seed=2)
        second.rename(self.store / "second")
        self.wait_for("second/model.safetensors", other)
        (self.store / "first").rename(self.tmp / "away")
        self.wait_for_names(["second"])
        self.assertIsNone(self.shown("first/model.safetensors"))
        # It has the same inode number when it is back: path and content are the same.
        number = os.stat(self.mount / "second/model.safetensors").st_ino
        (self.store / "second").rename(self.tmp / "second")
        self.wait_for_names([])
        (self.tmp / "second").rename(self.store / "second")
        # Until then the kernel may remember the folder that went, whose files are there again.
        self.wait_for_names(["second"])
        self.wait_for("second/model.safetensors", other)
        self.assertEqual(os.stat(self.mount / "second/model.safetensors").st_ino, number)

    def test_folders_deep_in_the_store_come_and_go(self):
        (self.store / "team/a").mkdir(parents=True)
        self.mounted()
        self.wait_for_names(["a"], "team")
        folder, whole = self.made("model")
        (self.store / "team/a/new").mkdir()
        shutil.copytree(folder, self.store / "team/a/new/model")
        self.wait_for("team/a/new/model/model.safetensors", whole)
        shutil.rmtree(self.store / "team/a/new")
        self.wait_for_names([], "team/a")

    def test_a_removed_checkpoint_leaves_no_error_behind(self):
        folder, whole = self.made("model")
        shutil.copytree(folder, self.store / "model")
        self.mounted()
        self.wait_for("model/model.safetensors", whole)
        seen = set()
        for file in sorted((self.store / "model").iterdir()):
            file.unlink()
            time.sleep(0.2)
            seen.update(os.listdir(self.mount / "model"))
        self.wait_for_names([], "model")
        self.assertNotIn(ERROR_FILE, seen)

    def test_plain_files_come_change_and_go(self):
        folder, whole = self.made("model")
        shutil.copytree(folder, self.store / "model")
        self.mounted()
        self.wait_for("model/model.safetensors", whole)
        note = self.store / "model/note.txt"
        note.write_text("one")
        self.wait_for("model/note.txt", b"one")
        with open(note, "a") as file:
            file.write(" two")
        self.wait_for("model/note.txt", b"one two")
        (self.tmp / "note").write_text("three")
        (self.tmp / "note").rename(note)
        self.wait_for("model/note.txt", b"three")
        self.assertEqual(os.stat(self.mount / "model/note.txt").st_size, 5)
        note.unlink()
        wait_until(lambda: "note.txt" not in os.listdir(self.mount / "model"), HANGS, "the note is gone")
        self.assertEqual(self.shown("model/model.safetensors"), whole)

    def test_a_folder_makes_place_for_a_file_and_comes_back(self):
        folder, whole = self.made("model")
        shutil.copytree(folder, self.store / "model")
        self.mounted()
        self.wait_for("model/model.safetensors", whole)
        for _ in range(3):
            (self.store / "model").rename(self.tmp / "away")
            (self.store / "model").write_text("a file")
            self.wait_for("model", b"a file")
            (self.store / "model").unlink()
            (self.tmp / "away").rename(self.store / "model")
            self.wait_for("model/model.safetensors", whole)

    def test_an_open_file_keeps_its_content_and_a_new_open_sees_the_new_one(self):
        folder, old = self.made("old")
        new, other = self.made("new", seed=2)
        shutil.copytree(folder, self.store / "model")
        self.mounted()
        self.wait_for("model/model.safetensors", old)
        with open(self.mount / "model/model.safetensors", "rb") as file:
            (self.store / "model").rename(self.tmp / "away")
            new.rename(self.store / "model")
            self.wait_for("model/model.safetensors", other)
            self.assert_same(file.read(), old)
            shutil.rmtree(self.tmp / "away")
            self.assertEqual(os.fstat(file.fileno()).st_nlink, 1)

    def test_a_working_folder_that_is_replaced_shows_the_new_one(self):
        folder, _ = self.made("old")
        new, other = self.made("new", seed=2)
        shutil.copytree(folder, self.store / "model")
        self.mounted()
        here = os.open(self.mount / "model", os.O_RDONLY | os.O_DIRECTORY)
        self.addCleanup(os.close, here)
        (self.store / "model").rename(self.tmp / "away")
        wait_until(lambda: os.listdir(here) == [], HANGS, "the folder is empty")
        new.rename(self.store / "model")
        self.wait_for("model/model.safetensors", other)
        wait_until(lambda: "model.safetensors" in os.listdir(here), HANGS, "the folder is full")

    def test_without_the_option_a_mount_shows_what_was_there(self):
        folder, whole = self.made("model")
        shutil.copytree(folder, self.store / "model")
        m = self.mounted("index-dir=none")
        shutil.copytree(folder, self.store / "more")
        (self.store / "model/new.txt").write_text("new")
        self.assertEqual(self.shown("model/model.safetensors"), whole)
        self.assertEqual(os.listdir(self.mount), ["model"])
        self.assertIsNone(watch_of(m))


class OnItsWay(Store):
    """Checkpoints that are written while the mount is watched all the time."""

    options = ("watch=auto", "watch-grace=60")

    def watching(self, whole, path="model/model.safetensors"):
        """Reads the mount again and again in the background; fails at the end if it showed anything but the whole."""
        stop, wrong = threading.Event(), []

        def watch():
            while not stop.is_set():
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    names = os.listdir((self.mount / path).parent)
                    if ERROR_FILE in names:
                        wrong.append((self.mount / path).parent.joinpath(ERROR_FILE).read_text())
                found = self.shown(path)
                if found is not None and found != whole:
                    wrong.append(f"{len(found)} bytes")
                time.sleep(0.01)

        thread = threading.Thread(target=watch)
        thread.start()

        def end():
            stop.set()
            thread.join()
            self.assertEqual(wrong, [])

        self.addCleanup(lambda: (stop.set(), thread.join()))
        return end

    def copy_slowly(self, source, target, parts=3, pause=0.15):
        target.parent.mkdir(parents=True, exist_ok=True)
        data = source.read_bytes()
        step = len(data) // parts + 1
        with open(target, "wb") as file:
            for start in range(0, len(data), step):
                file.write(data[start : start + step])
                file.flush()
                time.sleep(pause)

    # The mount said that there are no files of weights.
    def test_a_view_that_refuses_every_checkpoint_is_told_with_its_reason(self):
        for name in ("a", "b", "c"):
            checkpoints.hf_set(self.store / name, megabytes=1)
        log = self.tmp / "log"
        with Mount(self.store, "watch=auto", "include=nope*", f"log={log}"):
            (line,) = (line for line in log.read_text().splitlines() if "the source is watched" in line)
        self.assertIn(f"{self.store / 'a'}: include=`nope*` matches none of the", line)
        self.assertIn("; and 2 more checkpoints are refused; the source is watched", line)
        self.assertNotIn("here or below", line)

    def test_a_checkpoint_that_is_copied_file_by_file_is_shown_once_it_is_whole(self):
        for order in (1, -1):
            folder, whole = self.made(f"model{order}", seed=order + 5)
            self.mounted()
            target = f"copy{order}"
            end = self.watching(whole, f"{target}/model.safetensors")
            for file in sorted(folder.iterdir())[::order]:
                self.copy_slowly(file, self.store / target / file.name)
            self.wait_for(f"{target}/model.safetensors", whole)
            end()

    def test_rank_shards_that_come_one_by_one_are_shown_once_they_are_all_there(self):
        folder = self.tmp / "dcp"
        checkpoints.row_wise(folder)
        whole = oracle.from_dcp(folder)
        self.mounted()
        end = self.watching(whole)
        for file in sorted(folder.iterdir()):
            self.copy_slowly(file, self.store / "model" / file.name, parts=2)
        self.wait_for("model/model.safetensors", whole)
        end()

    def test_a_file_of_its_full_length_that_is_still_written_is_not_shown(self):
        data = checkpoints.random_bytes(3, 100_000)
        made = self.tmp / "one.safetensors"
        checkpoints.write_shard(made, [("t", "U8", [len(data)], data)])
        whole = made.read_bytes()
        self.mounted()
        end = self.watching(whole, "one.safetensors")
        with open(self.store / "one.safetensors", "wb") as file:
            file.write(whole[:1000])
            file.truncate(len(whole))
            file.flush()
            time.sleep(1.5)
            file.write(whole[1000:])
        self.wait_for("one.safetensors", whole)
        end()

    def test_a_tensorizer_file_whose_head_is_written_last_is_shown_once_it_is_whole(self):
        data = checkpoints.random_bytes(4, 100_000)
        made = self.tmp / "made.tensors"
        made.write_bytes(file_of([Stored.of("a", "U8", [len(data)], data), Stored.of("b", "F32", [2], bytes(8))]))
        raw, whole = made.read_bytes(), oracle.from_tensorizer(made)
        self.mounted()
        end = self.watching(whole, "one.safetensors")
        with open(self.store / "one.tensors", "wb") as file:
            # As the serializer does: the list of tensors is filled and counted at the end.
            for start, part in ((73, bytes(200)), (0, raw[:57] + bytes(16)), (500, raw[500:]), (0, raw)):
                file.seek(start)
                file.write(part)
                file.flush()
                time.sleep(0.5)
        self.wait_for("one.safetensors", whole)
        end()

    def test_downloads_of_the_hub_are_shown_once_they_are_whole(self):
        folder, whole = self.made("model")
        other = checkpoints.hub_cache(self.tmp / "models--org--tiny", folder)
        self.mounted()
        hub = self.store / "models--org--tiny"
        snapshot = f"snapshots/{other.name}"
        path = f"models--org--tiny/{snapshot}/model.safetensors"
        end = self.watching(whole, path)
        for made in ("blobs", "refs", snapshot):
            (hub / made).mkdir(parents=True)
        (hub / "refs/main").write_text(other.name)
        names = set()
        for link in sorted(other.iterdir()):
            blob = hub / "blobs" / link.resolve().name
            self.copy_slowly(link, blob.with_name(blob.name + ".incomplete"))
            with contextlib.suppress(FileNotFoundError):
                names.update(os.listdir(self.mount / "models--org--tiny/blobs"))
            blob.with_name(blob.name + ".incomplete").rename(blob)
            (hub / snapshot / link.name).symlink_to(os.readlink(link))
        self.wait_for(path, whole)
        end()
        self.assertFalse([name for name in names if name.endswith(".incomplete")])
        # A new snapshot comes, and the reference moves to it.
        newer, new = self.made("newer", seed=2)
        checkpoints.hub_cache(self.tmp / "newer--hub", newer)
        for blob in (self.tmp / "newer--hub/blobs").iterdir():
            shutil.copy(blob, hub / "blobs")
        shutil.copytree(
            self.tmp / "newer--hub/snapshots" / ("a" * 40), hub / "snapshots" / ("b" * 40), symlinks=True
        )
        (hub / "refs/next").write_text("b" * 40)
        (hub / "refs/next").rename(hub / "refs/main")
        self.wait_for(f"models--org--tiny/snapshots/{'b' * 40}/model.safetensors", new)
        self.wait_for("models--org--tiny/refs/main", b"b" * 40)
        self.assertEqual(self.shown(path), whole)
        shutil.rmtree(hub / "snapshots" / other.name)
        self.wait_for_names(["b" * 40], "models--org--tiny/snapshots")

    def test_a_broken_checkpoint_says_so_after_the_grace_and_is_shown_when_it_is_mended(self):
        folder, whole = self.made("model")
        lost = folder / checkpoints.shard_name(2, 3)
        lost.rename(self.tmp / "lost")
        m = self.mounted("watch=auto", "watch-grace=2")
        shutil.copytree(folder, self.store / "model")
        wait_until(lambda: (self.mount / "model/config.json").exists(), HANGS, "the folder is shown")
        self.assertNotIn(ERROR_FILE, os.listdir(self.mount / "model"))
        self.assertEqual(watch_of(m)["incomplete"], ["model/model.safetensors"])
        wait_until(lambda: ERROR_FILE in os.listdir(self.mount / "model"), HANGS, "the error is shown")
        self.assertIn("is not there", (self.mount / "model" / ERROR_FILE).read_text())
        shutil.move(self.tmp / "lost", self.store / "model" / lost.name)
        self.wait_for("model/model.safetensors", whole)
        self.assertNotIn(ERROR_FILE, os.listdir(self.mount / "model"))


class Links(Store):
    def test_links_that_are_switched_lead_to_the_new_target_at_once(self):
        old, first = self.made("v1")
        new, second = self.made("v2", seed=2)
        old.rename(self.store / "v1")
        new.rename(self.store / "v2")
        (self.store / "current").symlink_to("v1")
        (self.store / "shelf").mkdir()
        (self.store / "shelf/one.json").symlink_to("../current/config.json")
        self.mounted()
        self.wait_for("current/model.safetensors", first)
        for target, whole, config in (("v2", second, b"2"), ("v1", first, b"1")) * 2:
            (self.store / target / "config.json").write_bytes(config)
            (self.store / "next").symlink_to(target)
            (self.store / "next").rename(self.store / "current")
            self.wait_for("current/model.safetensors", whole)
            self.wait_for("shelf/one.json", config)
            self.wait_for_names(["current", "shelf", "v1", "v2"])

    def test_a_link_to_the_store_that_is_switched_is_named_in_the_log_and_not_followed(self):
        (folder, whole), (other, _) = self.made("first"), self.made("second", seed=2)
        link = self.tmp / "link"
        link.symlink_to(folder)
        m = self.enter(Mount(link, *self.options))
        self.assertEqual((m.path / "model.safetensors").read_bytes(), whole)
        for target in (other, folder, other):
            (self.tmp / "next").symlink_to(target)
            (self.tmp / "next").rename(link)
            if target == other:
                m.wait_for_log(f"{link}: leads to {other} now; the mount shows {folder} as long as it is there")
        self.assertEqual((m.path / "model.safetensors").read_bytes(), whole)

    def test_a_link_whose_target_comes_later_is_shown_then(self):
        folder, whole = self.made("model")
        (self.store / "model").symlink_to("later/model")
        self.mounted()
        self.assertEqual(os.listdir(self.mount), [])
        (self.store / "later").mkdir()
        folder.rename(self.store / "later/model")
        self.wait_for("model/model.safetensors", whole)
        shutil.rmtree(self.store / "later")
        self.wait_for_names([])

    def test_a_link_into_the_mount_itself_is_left_out(self):
        folder, whole = self.made("model")
        folder.rename(self.store / "model")
        self.mounted("watch=auto", f"follow={self.tmp.parent}")
        (self.store / "loop").symlink_to(self.mount)
        (self.store / "more").mkdir()
        self.wait_for_names(["model", "more"])
        self.assertEqual(self.shown("model/model.safetensors"), whole)


class Stalled(Store):
    def test_a_file_system_that_stalls_holds_up_only_its_own_changes(self):
        folder, whole = self.made("model")
        far = self.tmp / "far"
        shutil.copytree(folder, far / "first")
        with FaultFs(far) as faults:
            for made in ("links", "near"):
                (self.store / made).mkdir()
            (self.store / "links/far").symlink_to(faults.path)
            self.mounted("watch=auto", f"follow={faults.path}", "io-timeout=30")
            with faults.lifted():
                self.wait_for("links/far/first/model.safetensors", whole)
                for request in ("getattr", "lookup", "readdir"):
                    faults.tell(f"stall-{request}", "*")
                wait_until(lambda: faults.parked() > 0, HANGS, "a look is held back")
                for name in ("one", "two", "three"):
                    shutil.copytree(folder, self.store / "near" / name)
                    self.wait_for(f"near/{name}/model.safetensors", whole)
                shutil.rmtree(self.store / "near/one")
                wait_until(lambda: "one" not in os.listdir(self.mount / "near"), HANGS, "it is gone")
            shutil.copytree(folder, far / "second")
            self.wait_for("links/far/second/model.safetensors", whole)


    def test_links_into_a_file_system_that_stalls_hold_up_only_their_own_folders(self):
        folder, whole = self.made("model")
        far = self.tmp / "far"
        shutil.copytree(folder, far / "first")
        with FaultFs(far) as faults:
            linked = [self.store / f"links-{n}" for n in range(5)]
            for made in [*linked, self.store / "near"]:
                made.mkdir()
            for made in linked:
                (made / "far").symlink_to(faults.path / "first")
                (made / "config.json").symlink_to(faults.path / "first/config.json")
            self.mounted("watch=auto", f"follow={faults.path}", "io-timeout=30")
            with faults.lifted():
                self.wait_for("links-4/far/model.safetensors", whole)
                for request in ("getattr", "lookup", "readdir"):
                    faults.tell(f"stall-{request}", "*")
                # Each of these folders is local, and has changed.
                for made in linked:
                    (made / "new.json").write_text("1")
                    (made / "next").symlink_to(faults.path / "first/config.json")
                wait_until(lambda: faults.parked() > 0, HANGS, "a look is held back")
                for name in ("one", "two", "three"):
                    shutil.copytree(folder, self.store / "near" / name)
                    self.wait_for(f"near/{name}/model.safetensors", whole)
            for n in range(5):
                self.wait_for(f"links-{n}/new.json", b"1")


class Storms(Store):
    def test_thousands_of_renames_leave_right_bytes_and_nothing_behind(self):
        wholes = {}
        for seed, name in enumerate(("a", "v1", "v2", "turns"), 1):
            folder, wholes[name] = self.made(name, seed=seed)
            folder.rename(self.store / name)
        (self.store / "current").symlink_to("v1")
        m = self.mounted()
        self.wait_for("a/model.safetensors", wholes["a"])
        may_be = {"a": {"a"}, "b": {"a"}, "current": {"v1", "v2"}, "turns": {"turns"}, "turned": {"turns"}}
        reads = 0
        with Child(RENAMER, self.store) as child:
            self.assertEqual(child.line(), "ready")
            deadline = time.monotonic() + 4
            while time.monotonic() < deadline:
                for name, sources in may_be.items():
                    with contextlib.suppress(OSError):
                        data = (self.mount / name / "model.safetensors").read_bytes()
                        self.assertIn(data, [wholes[source] for source in sources])
                        reads += 1
            child.tell()
            rounds = int(child.line())
        self.assertGreater(rounds, 100)
        self.wait_for_names(["a", "current", "turns", "v1", "v2"])
        for name in ("a", "turns", "v1", "v2"):
            self.wait_for(f"{name}/model.safetensors", wholes[name])
        target = os.readlink(self.store / "current")
        self.wait_for("current/model.safetensors", wholes[target])
        # No more is watched than there is: the store and four folders.
        wait_until(lambda: watch_of(m)["folders_with_events"] == 5, HANGS, "no watch is left over")
        wait_until(lambda: threads_of(m.pid, "look") == 0, HANGS, "no thread is left over")


class Listings(Store):
    def test_a_reader_of_a_folder_misses_none_of_the_names_that_stay(self):
        names = [f"stays-{n:04}" for n in range(1500)]
        for name in [*names, "a-goes", "a-went"]:
            (self.store / name).write_text("")
        self.mounted()
        self.assertEqual(len(os.listdir(self.mount)), len(names) + 2)
        with os.scandir(self.mount) as entries:
            seen = [next(entries).name for _ in range(5)]
            # All others would move up if the position were the number of names before it.
            (self.store / "a-goes").unlink()
            (self.store / "a-went").unlink()
            (self.store / "a-came").write_text("")
            wait_until(lambda: "a-came" in os.listdir(self.mount), HANGS, "the change is seen")
            seen += [entry.name for entry in entries]
        self.assertEqual(sorted(name for name in seen if name.startswith("stays")), names)


def watch_of(m):
    """How the daemon finds changes, None if it does not look for any."""
    return next((found for found in values_of(status_of(m), "watch") if isinstance(found, dict)), None)


def threads_of(pid, name):
    found = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/comm") as file:
            found += file.read().strip() == name
    return found


class Polled(Appearing):
    """The same store without a single event."""

    options = ("watch=poll", "watch-interval=1")

    def test_the_status_tells_how_changes_are_found(self):
        (self.store / "sub").mkdir()
        m = self.mounted()
        wait_until(lambda: watch_of(m)["folders_polled"] == 2, HANGS, "both folders are polled")
        self.assertEqual(watch_of(m)["folders_with_events"], 0)
        self.assertEqual(watch_of(m)["mode"], "poll")


class WithoutInotify(Store):
    def test_a_system_without_inotify_is_polled(self):
        folder, whole = self.made("model")
        m = self.mounted("watch=auto", preexec_fn=without_inotify)
        folder.rename(self.store / "model")
        self.wait_for("model/model.safetensors", whole)
        self.assertIn("inotify", m.log())

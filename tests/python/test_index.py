"""The index: the same answers as without one, whatever happens to it, and never in anybody's way."""

import os
import pwd
import random
import shutil
import subprocess
import unittest
from pathlib import Path
from unittest import mock

import checkpoints
import test_live_changes
import test_replaced_files
from manifest import by_id
from mounts import BIN, HELPER, Mount, TestCase, needs_root, run, tensorfs, wait_until
from test_status import status_of

FILE = "model.safetensors"
PROCESSES = 200
SAID = "the index is not kept"

# A mount namespace with a file system of its own on $1, made with the options $2; then the rest.
ON_TMPFS = 'mount -t tmpfs -o "$2" tensorfs-test "$1" && shift 2 && exec "$@"'

# Mounts $2 on $3 with indexes in $4, prints the hash of what it shows, and unmounts.
USE = """
set -e
"$1" mount -v "$2" "$3" --index-dir "$4" -o log="$5"
trap '"$1" umount "$3" || "$1" umount --lazy "$3"' EXIT
sha256sum < "$3/model.safetensors"
"""


def in_namespace(folder, options, *words, **kwargs):
    return run("unshare", "--mount", "--propagation", "private", "sh", "-c", ON_TMPFS, "sh", folder, options, *words,
               **kwargs)


def has_namespaces():
    return run("unshare", "--mount", "--propagation", "private", "true").code == 0


class IndexCase(TestCase):
    def setUp(self):
        super().setUp()
        self.index = self.tmp / "index"
        self.source = self.copy(by_id("hf_three_shards").source, "model")

    def indexes(self, folder=None):
        """The names of all files in the folder of indexes."""
        folder = folder or self.index
        return sorted(os.listdir(folder)) if folder.exists() else []

    def command(self, name, *words, code=0, **kwargs):
        outcome = tensorfs(name, self.source, "--index-dir", self.index, *words, **kwargs)
        self.assertEqual(outcome.code, code, outcome.stderr)
        return outcome

    def listed(self, **kwargs):
        return self.command("ls", "--json", **kwargs).stdout

    def state(self, *words, **kwargs):
        (one,) = self.command("index", "--json", *words, **kwargs).json()["indexes"]
        return one

    def tree(self, models):
        tree = self.tmp / "tree"
        for number in range(models):
            shutil.copytree(self.source, tree / f"model-{number:02}")
        return tree


class ManyProcesses(IndexCase):
    def open_at_once(self):
        expected = tensorfs("ls", self.source, "--json", "--index-dir", "none").stdout
        words = [str(w) for w in (BIN, "ls", self.source, "--json", "--index-dir", self.index)]
        # Each waits for the end of a pipe that nobody writes to: all go on at the same time.
        script = 'read -r _; exec "$@" > "$0" 2>&1'
        outputs = [self.tmp / f"output-{number}" for number in range(PROCESSES)]
        reader, writer = os.pipe()
        processes = [subprocess.Popen(["sh", "-c", script, str(o), *words], stdin=reader) for o in outputs]
        os.close(reader)
        os.close(writer)
        codes = [process.wait(120) for process in processes]
        self.assertEqual(codes, [0] * PROCESSES)
        self.assertEqual({output.read_text() for output in outputs}, {expected})

    def test_two_hundred_processes_open_one_checkpoint_at_once(self):
        for state in ("without an index", "with one", "with a bad one"):
            with self.subTest(state):
                self.open_at_once()
                (name,) = self.indexes()
                self.assertRegex(name, r"^[0-9a-f]{32}\.index$")
                self.assertEqual(self.state()["state"], "fresh")
                if state == "with one":
                    (self.index / name).write_bytes(b"no index")


class Command(IndexCase):
    def test_it_builds_shows_and_rebuilds(self):
        built = self.state()
        self.assertEqual((built["state"], built["fresh"], built["reason"]), ("built", True, None))
        (name,) = self.indexes()
        self.assertEqual(built["path"], str(self.index / name))
        self.assertEqual(built["size"], (self.index / name).stat().st_size)
        self.assertEqual((built["sets"], built["shards"]), (1, 3))
        self.assertEqual(built["tensors"], len(by_id("hf_three_shards").tensors))
        inode = (self.index / name).stat().st_ino
        shown = self.state()
        self.assertEqual(shown["state"], "fresh")
        self.assertLess(shown["age_s"], 100)
        self.assertEqual((self.index / name).stat().st_ino, inode)
        rebuilt = self.state("--rebuild")
        self.assertEqual((rebuilt["state"], rebuilt["fresh"]), ("rebuilt", True))
        self.assertEqual(self.state()["state"], "fresh")

    def test_it_says_why_it_was_rebuilt(self):
        self.state()
        next(self.source.glob("model-00001*")).unlink()
        self.source.joinpath("model.safetensors.index.json").unlink()
        (self.source / "model-00002-of-00003.safetensors").rename(self.source / "model-00001-of-00002.safetensors")
        (self.source / "model-00003-of-00003.safetensors").rename(self.source / "model-00002-of-00002.safetensors")
        rebuilt = self.state()
        self.assertEqual((rebuilt["state"], rebuilt["reason"]), ("rebuilt", "lists other files"))

    def test_its_text_names_the_folder_the_state_and_the_file(self):
        for state in ("built", "fresh"):
            text = self.command("index").stdout
            (name,) = self.indexes()
            for part in (str(self.source), f"3 shards, {state}", str(self.index / name)):
                self.assertIn(part, text)

    def test_a_refused_checkpoint_fails_and_has_no_index(self):
        next(self.source.glob("model-00001*")).unlink()
        outcome = self.command("index", "--json", code=1)
        self.assert_refused(outcome)
        self.assertIn("model-00001-of-00003.safetensors", outcome.stderr)
        (one,) = outcome.json()["indexes"]
        self.assertEqual((one["state"], one["fresh"], one["size"]), ("refused", False, None))
        self.assertFalse(outcome.json()["ok"])
        self.assertEqual(self.indexes(), [])

    def test_a_tree_has_an_index_for_each_folder(self):
        tree = self.tree(5)
        outcome = tensorfs("index", tree, "--index-dir", self.index, "--json")
        self.assert_done(outcome)
        self.assertEqual([one["state"] for one in outcome.json()["indexes"]], ["built"] * 5)
        self.assertEqual(len(self.indexes()), 5)

    def test_wrong_use_and_nothing_to_index_are_told(self):
        empty = self.tmp / "empty"
        empty.mkdir()
        for words in (["index", empty], ["index", self.tmp / "none"], ["index", self.source, "--index-dir", "none"]):
            self.assert_refused(tensorfs(*words))
            outcome = tensorfs(*words, "--json")
            self.assertEqual(outcome.code, 1)
            self.assertIn("error", outcome.json())
        self.assertEqual(tensorfs("index").code, 2)

    def test_an_index_that_cannot_be_kept_fails_with_the_reason(self):
        self.index.write_text("a file where a folder should be")
        outcome = self.command("index", "--json", code=1)
        (one,) = outcome.json()["indexes"]
        self.assertEqual((one["state"], one["fresh"]), ("not_kept", False))
        self.assertIn(SAID, outcome.stderr)


class Damage(IndexCase):
    def test_no_damage_changes_an_answer(self):
        expected = self.listed()
        (name,) = self.indexes()
        path = self.index / name
        good = path.read_bytes()
        rng = random.Random(4)
        for _ in range(60):
            bad = bytearray(good)
            for _ in range(rng.choice((1, 1, 2, 30))):
                bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
            if rng.random() < 0.3:
                bad = bad[:rng.randrange(len(bad))]
            path.write_bytes(bad)
            outcome = self.command("ls", "--json")
            self.assertEqual((outcome.stdout, outcome.stderr), (expected, ""))
            # Silently made anew.
            self.assertEqual(self.state()["state"], "fresh")
        self.assertEqual(self.indexes(), [name])

    def test_a_mount_with_a_damaged_index_serves_right_bytes(self):
        self.listed()
        (name,) = self.indexes()
        path = self.index / name
        path.write_bytes(path.read_bytes()[:-1])
        with Mount(self.source, f"index-dir={self.index}") as m:
            self.assertEqual((m.path / FILE).read_bytes(), checkpoints.hf_whole(self.source))
            self.assertEqual(status_of(m.path)[0]["index"]["sets_from_headers"], 1)


class Mounts(IndexCase):
    def test_status_tells_which_mounts_started_from_an_index(self):
        expected = checkpoints.hf_whole(self.source)
        for from_index in (0, 1):
            with Mount(self.source, f"index-dir={self.index}") as m:
                index = status_of(m.path)[0]["index"]
                self.assertEqual(index["sets_from_index"], from_index)
                self.assertEqual(index["sets_from_headers"], 1 - from_index)
                self.assertEqual(index["folder"], str(self.index))
                self.assertIn("sets_from_index", tensorfs("status", m.path).stdout)
                self.assertEqual((m.path / FILE).read_bytes(), expected)

    def test_a_tree_is_indexed_in_the_background(self):
        tree = self.tree(25)
        with Mount(tree, f"index-dir={self.index}") as m:
            wait_until(lambda: len([n for n in self.indexes() if n.endswith(".index")]) == 25, 30, "all are indexed")
            self.assertEqual(len(os.listdir(m.path)), 25)
        with Mount(tree, f"index-dir={self.index}") as m:
            for model in m.path.iterdir():
                self.assertEqual((model / FILE).stat().st_size, len(checkpoints.hf_whole(self.source)))
            index = status_of(m.path)[0]["index"]
            self.assertEqual((index["sets_from_index"], index["sets_from_headers"]), (25, 0))

    def test_an_index_inside_the_target_is_not_waited_for(self):
        target = self.tmp / "mnt"
        target.mkdir()
        for folder in (target, target / "index", self.tmp / "model" / ".." / "mnt" / "x"):
            with Mount(self.source, f"index-dir={folder}", at=target) as m:
                self.assertIn("no index is kept", m.log())
                self.assertIsNone(status_of(m.path)[0]["index"]["folder"])
                self.assertEqual((m.path / FILE).read_bytes(), checkpoints.hf_whole(self.source))

    def test_a_command_with_its_index_inside_a_mount_goes_on_without(self):
        with Mount(self.source, "index-dir=none") as m:
            for folder in (m.path, m.path / "index"):
                outcome = tensorfs("ls", self.source, "--json", "--index-dir", folder)
                self.assert_done(outcome)
                self.assertEqual(outcome.stderr, "")

    def test_one_file_of_a_set_has_an_index_of_its_own(self):
        shard = next(self.source.glob("model-00002*"))
        for from_index in (0, 1):
            with Mount(shard, f"index-dir={self.index}") as m:
                self.assertEqual(status_of(m.path)[0]["index"]["sets_from_index"], from_index)
                self.assertEqual((m.path / FILE).read_bytes(), checkpoints.hf_whole(self.source))

    def test_the_demo_leaves_no_index(self):
        outcome = tensorfs("demo", timeout=100, env={**os.environ, "TENSORFS_INDEX_DIR": str(self.index)})
        self.assert_done(outcome)
        self.assertEqual(self.indexes(), [])


class Places(IndexCase):
    """The folder of the indexes."""

    def env(self, **variables):
        taken = ("TENSORFS_INDEX_DIR", "XDG_CACHE_HOME", "HOME")
        kept = {key: value for key, value in os.environ.items() if key not in taken}
        return {**kept, **{key: str(value) for key, value in variables.items()}}

    def folder(self, *words, **kwargs):
        outcome = run(BIN, "index", self.source, "--json", *words, **kwargs)
        self.assertIn(outcome.code, (0, 1), outcome.stderr)
        return outcome.json().get("folder")

    def test_options_win_over_variables_and_those_over_the_cache_folder(self):
        a, b, c = self.tmp / "a", self.tmp / "b", self.tmp / "c"
        env = self.env(TENSORFS_INDEX_DIR=a, XDG_CACHE_HOME=b)
        self.assertEqual(self.folder(env=env), str(a))
        self.assertEqual(self.folder("--index-dir", c, env=env), str(c))
        self.assertEqual(self.folder("-o", f"index-dir={c}", env=env), str(c))
        self.assertEqual(self.folder(env=self.env(XDG_CACHE_HOME=b)), str(b / "tensorfs"))
        for folder in (a, b / "tensorfs", c):
            self.assertEqual(len(self.indexes(folder)), 1)
            self.assertEqual(folder.stat().st_mode & 0o777, 0o700)

    def test_none_means_none(self):
        cache = self.tmp / "cache"
        for words, variables in (([], {"TENSORFS_INDEX_DIR": "none"}), (["--index-dir", "none"], {}),
                                 (["-o", "index-dir=none"], {})):
            env = self.env(XDG_CACHE_HOME=cache, **variables)
            self.assertIsNone(self.folder(*words, env=env))
            self.assert_done(run(BIN, "ls", self.source, *words, env=env))
            self.assertFalse(cache.exists())
        with Mount(self.source, "index-dir=none", env=self.env(XDG_CACHE_HOME=cache)) as m:
            self.assertIsNone(status_of(m.path)[0]["index"]["folder"])
        self.assertFalse(cache.exists())

    def test_a_relative_folder_is_that_of_whoever_mounts(self):
        tree = self.tree(3)
        work = self.tmp / "work"
        work.mkdir()
        env = self.env(TENSORFS_INDEX_DIR="index", XDG_CACHE_HOME="relative is ignored")
        with Mount(tree, background=True, env=env, cwd=work) as m:
            wait_until(lambda: len(self.indexes(work / "index")) == 3, 30, "all are indexed")
            folder = lambda: status_of(m.path)[0].get("index", {}).get("folder")
            # A machine with much else to do may answer too late once.
            wait_until(lambda: folder() == str(work / "index"), 20, "the folder in the status")
        with Mount(tree, "index-dir=other", background=True, env=env, cwd=work):
            wait_until(lambda: len(self.indexes(work / "other")) == 3, 30, "all are indexed")

    @needs_root
    def test_a_user_has_them_in_the_home(self):
        home = self.tmp / "home"
        home.mkdir()
        shutil.chown(home, "nobody")
        binary = self.tmp / "tensorfs"
        shutil.copy(BIN, binary)
        account = pwd.getpwnam("nobody")
        outcome = run(binary, "index", self.source, "--json", env=self.env(HOME=home, XDG_CACHE_HOME="relative"),
                      user=account.pw_uid, group=account.pw_gid, extra_groups=[])
        self.assert_done(outcome)
        self.assertEqual(outcome.json()["folder"], str(home / ".cache/tensorfs"))
        self.assertEqual(len(self.indexes(home / ".cache/tensorfs")), 1)

    @needs_root
    def test_root_has_them_in_var_cache(self):
        if not has_namespaces() or not Path("/var/cache").is_dir():
            self.skipTest("no mount namespaces, or no /var/cache")
        script = '"$1" index "$2" && stat -c "%a %n" /var/cache/tensorfs && ls /var/cache/tensorfs'
        outcome = in_namespace("/var/cache", "size=1m", "sh", "-c", script, "sh", BIN, self.source,
                               env=self.env(HOME=self.tmp / "home"))
        self.assert_done(outcome)
        self.assertIn("700 /var/cache/tensorfs", outcome.stdout)
        self.assertRegex(outcome.stdout, r"(?m)^[0-9a-f]{32}\.index$")
        self.assertFalse((self.tmp / "home").exists())

    @needs_root
    @unittest.skipUnless(HELPER.exists(), "no helper beside the binary")
    def test_the_helper_takes_the_option_too(self):
        target = self.tmp / "mnt"
        target.mkdir()
        outcome = run(HELPER, self.source, target, "-o", f"ro,index-dir={self.index}")
        self.addCleanup(run, BIN, "umount", target)
        self.assert_done(outcome)
        self.assertEqual(status_of(target)[0]["index"]["folder"], str(self.index))
        self.assertEqual(len(self.indexes()), 1)


@needs_root
class NoRoom(IndexCase):
    """A folder of indexes that takes none: nothing fails, and only -v says so."""

    def setUp(self):
        super().setUp()
        if not has_namespaces():
            self.skipTest("no mount namespaces")
        self.index.mkdir()
        (self.tmp / "mnt").mkdir()

    def assert_works(self, options, prepare="true"):
        plain = tensorfs("ls", self.source, "--json", "--index-dir", "none")
        script = f'd=$1; shift; {prepare}; "$@"; code=$?; ls -A "$d" >&2; exit $code'
        for verbose in ([], ["-v"]):
            outcome = in_namespace(self.index, options, "sh", "-c", script, "sh", self.index,
                                   BIN, "ls", self.source, "--json", "--index-dir", self.index, *verbose)
            self.assert_done(outcome)
            self.assertEqual(outcome.stdout, plain.stdout)
            self.assertEqual(SAID in outcome.stderr, bool(verbose), outcome.stderr)
            self.assertNotIn(".tmp", outcome.stderr)
            self.assertNotRegex(outcome.stderr, r"(?m)^[0-9a-f]{32}\.index$")
        log = self.tmp / "log"
        outcome = in_namespace(self.index, options, "sh", "-c", script, "sh", self.index,
                               "sh", "-c", USE, "sh", BIN, self.source, self.tmp / "mnt", self.index, log)
        self.assert_done(outcome)
        self.assertIn(SAID, log.read_text())
        whole = self.tmp / "whole"
        whole.write_bytes(checkpoints.hf_whole(self.source))
        with open(whole, "rb") as file:
            expected = subprocess.run(["sha256sum"], stdin=file, capture_output=True, text=True, check=True).stdout
        self.assertEqual(outcome.stdout, expected)

    def test_a_folder_that_is_read_only(self):
        self.assert_works("ro")

    def test_a_folder_that_is_full(self):
        self.assert_works("size=64k,mode=700", 'dd if=/dev/zero of="$d/fill" bs=4k 2>/dev/null')

    def test_a_folder_that_has_no_inode_left(self):
        self.assert_works("nr_inodes=1,mode=700")

    def test_a_user_who_may_not_write_there(self):
        binary = self.tmp / "tensorfs"
        shutil.copy(BIN, binary)
        account = pwd.getpwnam("nobody")
        user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        self.index.chmod(0o755)
        words = (binary, "ls", self.source, "--index-dir", self.index)
        quiet = run(*words, **user)
        self.assertEqual((quiet.code, quiet.stderr), (0, ""))
        self.assertIn(SAID, run(*words, "-v", **user).stderr)
        # An index that root has put there for all is used.
        self.listed()
        (name,) = self.indexes()
        (self.index / name).chmod(0o644)
        self.assertNotIn(SAID, run(*words, "-v", **user).stderr)


class OfAnotherUser(IndexCase):
    @needs_root
    def test_root_neither_uses_nor_writes_what_a_user_could_have_written(self):
        self.listed()
        shutil.chown(self.index, "nobody")
        before = [(self.index / name).stat().st_ino for name in self.indexes()]
        outcome = self.command("index", "--json", "-v", code=1)
        self.assertEqual(outcome.json()["indexes"][0]["state"], "not_kept")
        self.assertIn("others may write to its folder", outcome.stderr)
        self.assertEqual([(self.index / name).stat().st_ino for name in self.indexes()], before)
        self.assertEqual(self.command("ls").stderr, "")


# ---------------------------------------------------------------------------------------------
# Other tests once more, with mounts that start from an index.


class Warm(Mount):
    """A mount whose source has an index already."""

    def __enter__(self):
        run(BIN, "ls", self.source)
        return super().__enter__()


def warm(module, case):
    """The tests of `case` in `module`, with every mount started from an index."""

    def set_up(self):
        patched = mock.patch.object(module, "Mount", Warm)
        patched.start()
        self.addCleanup(patched.stop)
        super(again, self).setUp()

    again = type(f"{case.__name__}FromAnIndex", (case,), {"setUp": set_up, "__module__": __name__})
    return again


ReplacedFilesFromAnIndex = warm(test_replaced_files, test_replaced_files.ReplacedFiles)
LiveChangesFromAnIndex = warm(test_live_changes, test_live_changes.LiveChanges)


class WarmMounts(IndexCase):
    def test_they_do_start_from_the_index(self):
        with Warm(self.source) as m:
            self.assertEqual(status_of(m.path)[0]["index"]["sets_from_index"], 1)

    def test_a_shard_replaced_by_one_of_the_same_size_and_time_is_noticed_at_the_next_mount(self):
        shard = next(self.source.glob("model-00002*"))
        with Warm(self.source) as m:
            old = (m.path / FILE).read_bytes()
        stat = shard.stat()
        new = bytearray(shard.read_bytes())
        new[-1] ^= 1
        at = new.index(b'"format":"pt"')
        new[at:at + 13] = b'"format":"np"'
        replaced = self.source / "new"
        replaced.write_bytes(new)
        os.utime(replaced, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        os.replace(replaced, shard)
        with Mount(self.source) as m:
            self.assertEqual(status_of(m.path)[0]["index"]["sets_from_index"], 0)
            shown = (m.path / FILE).read_bytes()
        self.assertEqual(shown, checkpoints.hf_whole(self.source))
        self.assertNotEqual(shown, old)


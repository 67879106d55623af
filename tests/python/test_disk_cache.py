"""The disk cache of remote sources: persistent, shared, checked, bounded, and never a reason for a read to fail."""

import contextlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from faults import FaultFs
from mounts import BIN, Mount, TestCase, needs_root, read_or_none, run, tensorfs, wait_until
from object_server import SECRET_KEY, ObjectServer

FILE = "model.safetensors"
URL = "s3://bucket/models/one"
BLOCK = 16 << 10
SIZE = "cache-dir-size=1G"
# More of them are for a person who waits.
KILLS = int(os.environ.get("TENSORFS_TEST_KILLS", "4"))


def weights(seed, count=6, each=300_000):
    """A safetensors file of random bytes."""
    header, at = {}, 0
    for number in range(count):
        header[f"layer.{number}"] = {"dtype": "U8", "shape": [each], "data_offsets": [at, at + each]}
        at += each
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + random.Random(seed).randbytes(at)


class DiskCacheCase(TestCase):
    def setUp(self):
        super().setUp()
        self.server = ObjectServer().start()
        self.addCleanup(self.server.stop)
        self.data = weights(1)
        self.put(self.data)
        self.cache = self.tmp / "cache"
        self.env = {**os.environ, **self.server.environment(), "TENSORFS_INDEX_DIR": "none"}

    def put(self, data):
        self.server.put("bucket", f"models/one/{FILE}", data)

    def tensorfs(self, *words, **environment):
        return tensorfs(*words, env={**self.env, **environment})

    def command(self, out, *options):
        # Without a size it depends on the free space of the machine.
        size = [] if any(option.startswith("cache-dir-size") or not option for option in options) else [SIZE]
        words = [word for option in (f"cache-dir={self.cache}", *size, *options) if option for word in ("-o", option)]
        return [str(word) for word in (BIN, "consolidate", *words, URL, out)]

    def copy(self, *options):
        """The bytes that a process reads which starts now, and what it says."""
        out = self.tmp / "out.safetensors"
        out.unlink(missing_ok=True)
        outcome = run(*self.command(out, *options), env=self.env)
        self.assert_done(outcome)
        return out.read_bytes(), outcome.stderr

    def assert_whole(self, *options):
        found, said = self.copy(*options)
        self.assertTrue(found == self.data)
        return said

    def mount(self, *options, **environment):
        return Mount(URL, f"cache-dir={self.cache}", SIZE, *options, env={**self.env, **environment})

    def ranges(self):
        """The ranges that were asked for, in bytes."""
        found = []
        for request in self.server.requests:
            if request["Range"]:
                start, _, last = request["Range"].removeprefix("bytes=").partition("-")
                found.append((int(start), int(last) + 1))
        return found

    def assert_each_block_once(self):
        counts = [0] * -(-len(self.data) // BLOCK)
        for start, end in self.ranges():
            for block in range(start // BLOCK, -(-end // BLOCK)):
                counts[block] += 1
        self.assertEqual(set(counts), {1}, counts)

    def listed(self):
        outcome = self.tensorfs("cache", "ls", "--json", "--cache-dir", self.cache)
        self.assert_done(outcome)
        return json.loads(outcome.stdout)["objects"]


class Sharing(DiskCacheCase):
    def test_what_one_process_has_read_the_next_one_takes_from_the_disk(self):
        self.assert_whole()
        self.assert_each_block_once()
        self.server.requests.clear()
        self.assert_whole()
        self.assertEqual(self.ranges(), [])
        (kept,) = self.listed()
        self.assertEqual((kept["url"], kept["size"], kept["cached_bytes"]), (f"{URL}/{FILE}", len(self.data), len(self.data)))

    def test_a_mount_leaves_its_blocks_to_the_next_one_and_to_commands(self):
        for _ in range(2):
            with self.mount("watch=off") as mount:
                self.assertTrue((mount.path / FILE).read_bytes() == self.data)
        self.assert_whole()
        self.assert_each_block_once()

    def test_two_mounts_and_two_commands_at_once_fetch_each_block_once(self):
        self.server.delay = 0.05
        with self.mount("watch=off") as first, self.mount("watch=off") as second:
            outs = [self.tmp / f"{number}.safetensors" for number in range(2)]
            processes = [subprocess.Popen(self.command(out), env=self.env) for out in outs]
            readers = [subprocess.Popen(["cat", mount.path / FILE], stdout=subprocess.PIPE) for mount in (first, second)]
            found = [reader.communicate(timeout=60)[0] for reader in readers]
            codes = [process.wait(60) for process in processes]
            self.assertEqual(codes, [0, 0])
            found += [out.read_bytes() for out in outs]
            self.assertTrue(all(data == self.data for data in found))
        self.assert_each_block_once()

    @needs_root
    def test_two_containers_that_have_the_folder_at_other_paths_fetch_each_block_once(self):
        self.server.delay = 0.05
        self.cache.mkdir(mode=0o700)
        processes, outs = [], []
        for number in range(2):
            place = self.tmp / f"container-{number}"
            place.mkdir()
            outs.append(self.tmp / f"{number}.safetensors")
            words = [BIN, "consolidate", "-o", f"cache-dir={place},{SIZE}", URL, outs[-1]]
            # A view of the mounts and of the processes of its own.
            inside = ["sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', self.cache, place, *words]
            unshared = ["unshare", "--mount", "--pid", "--fork", *map(str, inside)]
            processes.append(subprocess.Popen(unshared, env=self.env, stdout=subprocess.DEVNULL))
        self.assertEqual([process.wait(60) for process in processes], [0, 0])
        self.assertTrue(all(out.read_bytes() == self.data for out in outs))
        self.assert_each_block_once()
        self.assertEqual(len(self.listed()), 1)

    def test_mounts_have_it_below_the_users_cache_folder_and_other_commands_do_not(self):
        environment = {"XDG_CACHE_HOME": str(self.tmp / "home"), "TENSORFS_CACHE_DIR": ""}
        place = self.tmp / "home/tensorfs/remote"
        self.assert_done(self.tensorfs("load", URL, **environment))
        self.assertFalse(place.exists())
        env = {**self.env, **environment}
        with Mount(URL, "watch=off", SIZE, env=env) as mount:
            self.assertTrue((mount.path / FILE).read_bytes() == self.data)
        self.assertTrue(list(place.glob("*.map")))
        self.assertEqual(place.stat().st_mode & 0o777, 0o700)
        shutil.rmtree(place)
        for options in (["cache-dir=none"], []):
            turned_off = {**env, "TENSORFS_CACHE_DIR": "" if options else "none"}
            with Mount(URL, "watch=off", *options, env=turned_off) as mount:
                self.assertTrue((mount.path / FILE).read_bytes() == self.data)
            self.assertFalse(place.exists())

    def test_no_secret_comes_into_the_folder(self):
        self.assert_whole()
        names = list(self.cache.rglob("*"))
        self.assertTrue(names)
        for path in names:
            self.assertEqual(path.stat().st_mode & 0o077, 0)
            self.assertNotIn(SECRET_KEY.encode(), path.read_bytes())
            self.assertNotIn(SECRET_KEY, path.name)


class Versions(DiskCacheCase):
    def test_blocks_of_an_object_that_was_replaced_are_never_served(self):
        self.assert_whole()
        self.data = weights(2)
        self.put(self.data)
        self.assert_whole()
        self.assertEqual(len(self.listed()), 2)

    def test_an_object_that_is_replaced_under_a_mount_is_an_error_and_not_mixed(self):
        with self.mount("watch=off") as mount, open(mount.path / FILE, "rb") as file:
            first = file.read(4096)
            self.assertEqual(first, self.data[:4096])
            self.put(weights(2))
            file.seek(len(self.data) - 4096)
            with self.assertRaises(OSError):
                file.read()

    def test_a_server_that_does_not_tell_versions_apart_has_no_cache(self):
        self.server.tags = "none"
        self.server.dates = False
        self.server.public.add("bucket")
        url = f"{self.server.url}/bucket/models/one/{FILE}"
        for _ in range(2):
            self.server.requests.clear()
            out = self.tmp / "out.safetensors"
            out.unlink(missing_ok=True)
            self.assert_done(self.tensorfs("consolidate", "-o", f"cache-dir={self.cache}", url, out))
            self.assertTrue(out.read_bytes() == self.data)
            self.assertTrue(self.ranges())


class Damage(DiskCacheCase):
    def data_file(self):
        (path,) = self.cache.glob("*.data")
        return path

    def test_a_block_that_was_changed_on_the_disk_is_read_from_the_server_again(self):
        self.assert_whole()
        path = self.data_file()
        for at in (0, BLOCK - 1, BLOCK, len(self.data) - 1):
            with open(path, "r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1]))
            self.server.requests.clear()
            said = self.assert_whole()
            self.assertIn("damaged", said)
            block = at // BLOCK * BLOCK
            self.assertEqual(self.ranges(), [(block, min(block + BLOCK, len(self.data)))])

    def test_verify_finds_a_changed_block_and_prune_removes_objects(self):
        self.assert_whole()
        words = ("--cache-dir", self.cache)
        self.assert_done(self.tensorfs("cache", "verify", *words))
        with open(self.data_file(), "r+b") as file:
            file.write(b"other")
        outcome = self.tensorfs("cache", "verify", "--json", *words)
        self.assertEqual((outcome.code, json.loads(outcome.stdout)["damaged_blocks"]), (1, 1))
        self.assert_done(self.tensorfs("cache", "verify", *words))
        self.assertEqual(self.listed()[0]["cached_bytes"], len(self.data) - BLOCK)
        self.assertIn(f"{URL}/{FILE}", self.tensorfs("cache", "ls", *words).stdout)
        pruned = self.tensorfs("cache", "prune", "--json", *words)
        self.assertEqual(json.loads(pruned.stdout)["removed_objects"], 0)
        self.assert_done(self.tensorfs("cache", "prune", "--keep", "0", *words))
        self.assertEqual((self.listed(), list(self.cache.iterdir())), ([], []))
        self.assertEqual(self.tensorfs("cache", "ls", "--keep", "0", *words).code, 2)

    def test_objects_of_another_version_of_tensorfs_count_as_space_and_stay_until_room_is_made(self):
        self.assert_whole()
        (map_file,) = self.cache.glob("*.map")
        with open(map_file, "r+b") as file:
            file.write(b"TFSBLK02")
        words = ("--cache-dir", self.cache)
        listed = self.tensorfs("cache", "ls", "--json", *words).json()
        self.assertEqual((listed["objects"], listed["objects_of_other_versions"]), ([], 1))
        self.assertGreaterEqual(listed["disk_bytes_of_other_versions"], len(self.data))
        self.assertEqual(listed["disk_bytes"], listed["disk_bytes_of_other_versions"])
        self.assertIn("1 object of other versions of tensorfs", self.tensorfs("cache", "ls", *words).stdout)
        self.assert_done(self.tensorfs("cache", "verify", *words))
        self.assertEqual(self.tensorfs("cache", "prune", "--json", *words).json()["removed_objects"], 0)
        self.assertTrue(map_file.exists())
        self.assertEqual(self.tensorfs("cache", "prune", "--keep", "0", "--json", *words).json()["removed_objects"], 1)
        self.assertEqual(list(self.cache.iterdir()), [])

    def test_verify_fails_if_a_map_cannot_be_read_and_prune_warns_of_what_is_no_file(self):
        self.assert_whole()
        (map_file,) = self.cache.glob("*.map")
        with open(map_file, "r+b") as file:
            file.seek(100)
            file.write(b"other")
        pipe = self.cache / f"{'0' * 32}.map"
        os.mkfifo(pipe)
        words = ("--cache-dir", self.cache)
        verified = self.tensorfs("cache", "verify", "--json", *words)
        self.assertEqual((verified.code, json.loads(verified.stdout)["ok"]), (1, False))
        self.assertEqual(set(json.loads(verified.stdout)["unusable_maps"]), {str(map_file), str(pipe)})
        self.assertIn(f"{map_file}: cannot be used: damaged", verified.stderr)
        pruned = self.tensorfs("cache", "prune", "--json", *words)
        self.assertEqual((pruned.code, json.loads(pruned.stdout)["removed_objects"]), (0, 1))
        (warning,) = pruned.stderr.splitlines()
        self.assertIn(f"{pipe}: not a regular file; it stays there", warning)
        self.assertEqual(list(self.cache.iterdir()), [pipe])

    def test_a_process_that_is_killed_while_it_fills_leaves_right_blocks_or_none(self):
        chance = random.Random(3)
        blocks = -(-len(self.data) // BLOCK)
        for _ in range(KILLS):
            shutil.rmtree(self.cache, ignore_errors=True)
            self.server.requests.clear()
            number = chance.randrange(1, 5)
            with self.mount("watch=off", "cache=16M") as mount:
                reader = subprocess.Popen(["cat", mount.path / FILE], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                wait_until(lambda: len(self.server.requests) >= number, 20, "requests")
                for _ in range(chance.randrange(2000)):
                    pass
                mount.kill(signal.SIGKILL)
                reader.wait(20)
                mount.wait_for_exit()
                tensorfs("umount", "--dead", mount.path)
            self.assert_done(self.tensorfs("cache", "verify", "--cache-dir", self.cache))
            self.server.requests.clear()
            self.assert_whole()
            self.assertLessEqual(len(self.ranges()), blocks + 2)
            self.assertEqual(len(list(self.cache.glob("*.map"))), 1)


class LocalFiles(DiskCacheCase):
    """Objects that are in the cache as a whole."""

    def counters(self, mount):
        return tensorfs("status", mount.path, "--json").json()[0]["counters"]

    def opened_by_kernel(self, mount):
        """The file in the mount, once the kernel serves it."""

        def opened():
            file = open(mount.path / FILE, "rb")
            if self.counters(mount)["opens_passthrough"]:
                self.addCleanup(file.close)
                return file
            file.close()
            return None

        return wait_until(opened, 20, "an open that the kernel serves")

    def skip_without_passthrough(self):
        local = self.tmp / "local"
        local.mkdir()
        (local / FILE).write_bytes(self.data)
        with Mount(local) as mount:
            (mount.path / FILE).read_bytes()
            if not self.counters(mount)["opens_passthrough"]:
                self.skipTest("the kernel serves no files by itself here")

    @needs_root
    def test_the_kernel_serves_a_whole_object_which_keeps_its_bytes_when_it_is_removed(self):
        self.skip_without_passthrough()
        with self.mount("watch=off") as mount:
            self.assertTrue((mount.path / FILE).read_bytes() == self.data)
            file = self.opened_by_kernel(mount)
            self.server.requests.clear()
            self.assertTrue(file.read() == self.data)
            self.assert_done(self.tensorfs("cache", "prune", "--keep", "0", "--cache-dir", self.cache))
            self.assertEqual(list(self.cache.iterdir()), [])
            file.seek(0)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self.assertTrue(file.read() == self.data)
            self.assertEqual(self.ranges(), [])
            file.close()
            self.assertTrue((mount.path / FILE).read_bytes() == self.data)
        self.assert_whole()

    @needs_root
    def test_a_file_that_the_kernel_serves_keeps_its_version_and_the_next_open_has_the_new_one(self):
        self.skip_without_passthrough()
        with self.mount("watch=off") as mount:
            old = (mount.path / FILE).read_bytes()
            file = self.opened_by_kernel(mount)
            self.data = weights(2)
            self.put(self.data)
            self.assertTrue(file.read() == old == weights(1))
            file.close()

            def is_new():
                found = read_or_none(mount.path / FILE)
                self.assertTrue(found in (None, old, self.data))
                return found == self.data

            wait_until(is_new, 20, "the new object")

    def test_the_daemon_reads_a_whole_object_as_a_local_file(self):
        # More than the daemon and the test keep in memory.
        self.data = weights(5, count=4, each=8_000_000)
        self.put(self.data)
        with self.mount("watch=off", "cache=16M", "passthrough=never") as mount:

            def is_read_locally():
                with open(mount.path / FILE, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    self.assertTrue(file.read() == self.data)
                # No read of a store takes them from there.
                return self.counters(mount)["bytes_from_page_cache"] > 0

            wait_until(is_read_locally, 60, "bytes from the page cache of the local disk")
            self.assert_each_block_once()
            self.assert_done(self.tensorfs("cache", "prune", "--keep", "0", "--cache-dir", self.cache))
            is_read_locally()


class StalledDisks(DiskCacheCase):
    READERS = 40

    def read_at_once(self, path):
        """Whether the bytes are right of as many readers as a device has threads, and more."""

        def read(number):
            at = number * len(self.data) // self.READERS
            with open(path, "rb") as file:
                return self.data[at : at + 4096] == os.pread(file.fileno(), 4096, at)

        with ThreadPoolExecutor(self.READERS) as readers:
            return list(readers.map(read, range(self.READERS)))

    def test_no_read_fails_because_the_disk_stops_to_answer(self):
        self.assert_whole()
        for stall in ("stall", "stall-open", "stall-lookup"):
            with self.subTest(stall=stall), FaultFs(self.cache) as faults, faults.lifted():
                options = (f"cache-dir={faults.path}", SIZE, "watch=off", "io-timeout=8", "readahead=0")
                with Mount(URL, *options, env=self.env) as mount:
                    faults.tell(stall, "*")
                    # Half of the time of the first reads goes to the disk.
                    for _ in range(2):
                        self.assertEqual(self.read_at_once(mount.path / FILE), [True] * self.READERS)
                    self.assertTrue((mount.path / FILE).read_bytes() == self.data)
                    # The object is open, and perhaps looked up, from the start of the mount.
                    self.assertTrue(faults.parked() > 0 or stall != "stall")
                    # The end of a process waits for its reads.
                    faults.tell("ok")

    def test_a_command_goes_on_without_a_disk_that_does_not_answer(self):
        self.assert_whole()
        with FaultFs(self.cache) as faults, faults.lifted():
            faults.tell("stall-lookup", "*")
            words = [BIN, "load", URL, "-o", f"cache-dir={faults.path}", "-o", "io-timeout=15", "--json"]
            process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=self.env)
            self.assertEqual(json.loads(process.stdout.readline())["bytes"], 6 * 300_000)
            process.stdout.close()
            # Until the disk answers the kernel holds what is left of the process.
            faults.tell("ok")
            self.assertEqual(process.wait(60), 0)


class Folders(DiskCacheCase):
    @contextlib.contextmanager
    def tmpfs(self, size):
        self.cache.mkdir()
        self.assert_done(run("mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", self.cache))
        try:
            yield
        finally:
            self.assert_done(run("umount", self.cache))

    @needs_root
    def test_a_full_disk_is_no_error_and_one_warning(self):
        with self.tmpfs("512k"):
            said = self.assert_whole("cache-dir-size=1G")
            self.assertEqual(said.count("keeps nothing for now"), 1, said)
            self.assert_whole("cache-dir-size=1G")
            self.assert_done(self.tensorfs("cache", "verify", "--cache-dir", self.cache))

    @needs_root
    def test_without_a_size_a_small_disk_is_left_alone(self):
        with self.tmpfs("16m"):
            self.assertIn("there is no room", self.assert_whole(""))
            self.assertLess(sum(path.stat().st_blocks * 512 for path in self.cache.iterdir()), 1 << 20)

    @needs_root
    def test_a_folder_that_cannot_be_written_serves_what_it_has(self):
        with self.tmpfs("64m"):
            self.assert_whole("cache-dir-size=32M")
            self.assert_done(run("mount", "-o", "remount,ro", self.cache))
            self.server.requests.clear()
            self.assertEqual(self.assert_whole("cache-dir-size=32M").count("keeps nothing for now"), 1)
            self.assertEqual(self.ranges(), [])
            self.data = weights(2)
            self.put(self.data)
            self.assertEqual(self.assert_whole("cache-dir-size=32M").count("keeps nothing for now"), 1)
            self.assert_done(run("mount", "-o", "remount,rw", self.cache))

    def test_a_folder_that_is_a_file_is_no_error(self):
        self.cache.write_bytes(b"")
        self.assertEqual(self.assert_whole().count("keeps nothing for now"), 1)

    def test_a_folder_that_is_removed_under_a_mount_is_made_anew(self):
        names = [str(number) for number in range(200)]
        for name in names:
            self.server.put("bucket", f"models/{name}/{FILE}", self.data)
        with Mount(URL.rpartition("/")[0], f"cache-dir={self.cache}", SIZE, env=self.env) as mount:
            self.assertTrue((mount.path / "one" / FILE).read_bytes() == self.data)
            shutil.rmtree(self.cache)

            def is_kept_again():
                # The bytes of an object that is open stay in its removed file, so each read is of another object.
                self.assertTrue((mount.path / names.pop() / FILE).read_bytes() == self.data)
                return self.listed()

            wait_until(is_kept_again, 20, "an object in the new folder")

    def test_a_folder_in_the_mount_itself_is_not_used(self):
        place = self.tmp / "mnt"
        place.mkdir()
        with Mount(URL, f"cache-dir={place}/x", "watch=off", at=place, env=self.env) as mount:
            self.assertTrue((mount.path / FILE).read_bytes() == self.data)
            mount.wait_for_log("lies in the mount; there is no disk cache")

    def test_more_than_the_size_makes_room_by_recency(self):
        names = [f"{number}" for number in range(4)]
        for name in names:
            self.server.put("bucket", f"{name}/{FILE}", weights(name, count=2, each=4_000_000))
        for name in names:
            words = ("-o", f"cache-dir={self.cache},cache-dir-size=20M")
            self.assert_done(self.tensorfs("load", *words, f"s3://bucket/{name}"))
            for path in self.cache.glob("*.map"):
                older = path.stat().st_mtime - 1000
                os.utime(path, (older, older))
        kept = self.listed()
        self.assertEqual([row["url"] for row in kept], [f"s3://bucket/{name}/{FILE}" for name in ("3", "2")][: len(kept)])
        self.assertLessEqual(sum(row["disk_bytes"] for row in kept), 20 << 20)
        self.assertTrue(kept)

    def test_a_size_that_cannot_work_is_refused(self):
        outcome = self.tensorfs("ls", "-o", "cache-dir-size=1M", URL)
        self.assertEqual(outcome.code, 2)
        self.assertIn("a size from 16M", outcome.stderr)

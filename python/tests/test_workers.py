"""Threads, forks, Ctrl-C, and an interpreter that has neither numpy nor torch."""

import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import unittest
import weakref

import numpy as np
from safetensors.numpy import save_file

import tensorfs
from checkpoints import hf_set, random_bytes, row_wise
from faults import FaultFs
from package import TestCase, dlpack_bytes, needs_torch, python, wait_until
from tensorfs import _settings, _tensorfs

SECONDS = 30


def in_child(work, seconds=SECONDS):
    """The result of `work` in a child that is made by a plain fork. The child must end in time."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read)
            os.write(write, repr(work()).encode())
            code = 0
        except BaseException as e:
            os.write(write, f"{type(e).__name__}: {e}".encode())
        finally:
            os._exit(code)
    os.close(write)
    with open(read, "rb") as answer:
        # This waits without a thread, because some processes must not have threads, and without an alarm, because the
        # first process of a namespace ignores it.
        if not select.select([answer], [], [], seconds)[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"the child did not answer in {seconds} seconds")
        text = answer.read().decode()
    _, status = os.waitpid(child, 0)
    if status:
        raise AssertionError(f"the child ended with {os.waitstatus_to_exitcode(status)}: {text}")
    return text


class Threads(TestCase):
    def test_eight_threads_share_one_handle(self):
        folder = row_wise(self.tmp / "dcp")
        with tensorfs.safe_open(folder, "dlpack") as f:
            right, wrong = dlpack_bytes(f), []

            def work(seed):
                names = list(right)
                for turn in range(20):
                    name = names[(seed + turn) % len(names)]
                    tensor = f.get_tensor(name)
                    if (tensor.dtype, list(tensor.shape), tensor.tobytes()) != right[name]:
                        wrong.append(name)
                if dlpack_bytes(f) != right:
                    wrong.append("all")

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(wrong, [])


class WithoutProc(TestCase):
    def test_everything_loads_where_proc_is_not_mounted_and_a_link_in_the_way_is_refused(self):
        folder, file = hf_set(self.tmp / "hf"), self.tmp / "model.safetensors"
        save_file({"w": np.frombuffer(random_bytes(1, 9_000_000), np.uint8)}, file)
        code = """
import ctypes, os, sys
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
new_user, new_mount, private = 0x10000000, 0x20000, 1 << 18 | 1 << 14
if libc.unshare(new_mount | (0 if os.geteuid() == 0 else new_user)):
    sys.exit(print("not allowed"))
if libc.mount(b"none", b"/", None, private, None) or libc.mount(b"none", b"/proc", b"tmpfs", 0, None):
    sys.exit(print("not allowed"))
assert not os.listdir("/proc")

import hashlib, tensorfs
folder, file = map(Path, sys.argv[1:])
right = file.read_bytes()[-9_000_000:]
for source in ("auto", "direct", "buffered"):
    for engine in ("auto", "threads"):
        found = tensorfs.load_file(file, "dlpack", source=source, engine=engine)["w"].tobytes()
        assert found == right, (source, engine)
into = bytearray(9_000_000)
tensorfs.load_into({"w": into}, file)
assert into == right
assert len(tensorfs.load_file(folder, "dlpack")) == len(tensorfs.load_file(sorted(folder.glob("*.safetensors")), "dlpack"))
opened = tensorfs.safe_open(file, "dlpack")
file.rename(file.with_name("elsewhere"))
os.mkfifo(file)
assert opened.get_tensor("w").tobytes() == right
try:
    tensorfs.safe_open(file, "dlpack")
except (tensorfs.SafetensorError, OSError) as e:
    print(e)
"""
        said = python(code, folder, file)
        if "not allowed" in said:
            self.skipTest("no mount namespaces here")
        self.assertIn("regular file", said)


class ControlGroups(TestCase):
    def test_what_is_left_of_a_limit_counts_and_not_the_limit(self):
        file = self.tmp / "model.safetensors"
        save_file({"w": np.zeros(20 << 20, np.uint8)}, file)
        code = """
import ctypes, os, sys
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
new_user, new_mount, private = 0x10000000, 0x20000, 1 << 18 | 1 << 14
root = Path("/sys/fs/cgroup")
if libc.unshare(new_mount | (0 if os.geteuid() == 0 else new_user)):
    sys.exit(print("not allowed"))
if libc.mount(b"none", b"/", None, private, None) or libc.mount(b"none", bytes(root), b"tmpfs", 0, None):
    sys.exit(print("not allowed"))

import tensorfs
limit = 10 << 30

def set_up(used, cached):
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            group = root / "memory" / path.strip("/")
            values = {"limit_in_bytes": limit, "usage_in_bytes": used, "memsw.limit_in_bytes": limit,
                      "memsw.usage_in_bytes": used, "stat": f"total_inactive_file {cached}"}
        elif not controllers:
            group = root / path.strip("/")
            values = {"max": limit, "current": used, "swap.max": 0, "swap.current": 0, "stat": f"active_file {cached}"}
        else:
            continue
        group.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (group / f"memory.{name}").write_text(f"{value}\\n")

def load():
    try:
        return len(tensorfs.load_file(sys.argv[1], "dlpack"))
    except MemoryError as e:
        return str(e)

for used, cached in ((0, 0), (limit - (8 << 20), 0), (limit - (8 << 20), 1 << 30)):
    set_up(used, cached)
    print(load())
"""
        said = python(code, file)
        if "not allowed" in said:
            self.skipTest("no mount namespaces here")
        free, full, cached = said.splitlines()
        self.assertEqual((free, cached), ("1", "1"))
        self.assertRegex(full, "takes 2\\d{7} bytes of memory, 8388608 are available")


class Forks(TestCase):
    def setUp(self):
        super().setUp()
        self.folder = hf_set(self.tmp / "hf")
        self.opened = tensorfs.safe_open(self.folder, "dlpack")
        self.right = dlpack_bytes(self.opened)

    def same(self):
        """Whether all ways to load in a child give the right bytes."""
        opened = tensorfs.safe_open(self.folder, "dlpack")
        singly = {name: self.opened.get_tensor(name).tobytes() for name in self.opened.keys()}
        return (
            dlpack_bytes(self.opened) == self.right
            and dlpack_bytes(opened) == self.right
            and all(singly[name] == data for name, (_, _, data) in self.right.items())
            and len(dict(self.opened.prefetch())) == len(self.right)
        )

    def test_a_child_loads_with_a_handle_of_its_parent_and_with_its_own(self):
        self.assertEqual(in_child(self.same), "True")
        self.assertTrue(self.same())

    def test_a_grandchild_loads_too(self):
        self.assertEqual(in_child(lambda: self.same() and in_child(self.same)), repr("True"))

    def test_a_child_with_the_process_number_of_its_parent_loads_too(self):
        """Equal process numbers happen if the first process of a container makes the first process of another
        container."""
        unshare = ctypes.CDLL(None, use_errno=True).unshare
        new_user, new_pid = 0x10000000, 0x20000000

        def in_namespace(work):
            if unshare(new_pid | (0 if os.geteuid() == 0 else new_user)):
                return "not allowed"
            return in_child(work)

        def first():
            number, right = os.getpid(), self.same()
            prefetch = self.opened.prefetch()

            def second():
                with contextlib.suppress(tensorfs.SafetensorError):
                    prefetch.take(prefetch.names()[0])
                    return "a prefetch of the parent"
                prefetch.close()
                return os.getpid() == number and self.same()

            # A process with several threads must not make a namespace of users, so a child does it.
            return right, in_child(lambda: in_namespace(second))

        answer = in_child(lambda: in_namespace(first))
        if "not allowed" in answer:
            self.skipTest("no PID namespaces here")
        self.assertEqual(answer.replace("\\", "").replace("'", "").replace('"', ""), "(True, True)")

    def test_a_child_made_while_others_load_never_hangs(self):
        stop = threading.Event()

        def load():
            while not stop.is_set():
                tensorfs.load_file(self.folder, "dlpack")
                self.opened.get_tensors()

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(20):
                self.assertEqual(in_child(self.same), "True")
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def test_a_child_made_in_the_middle_of_a_stalled_load_loads_from_elsewhere(self):
        other = row_wise(self.tmp / "dcp")
        with FaultFs(self.folder) as source, source.lifted():
            stalled = tensorfs.safe_open(source.path, "dlpack")
            source.tell("stall", "*.safetensors")
            thread = threading.Thread(target=stalled.get_tensors)
            thread.start()
            wait_until(source.parked, SECONDS, "a read that stalls")
            self.assertEqual(in_child(lambda: len(tensorfs.load_file(other, "dlpack"))), "3")
            self.assertEqual(in_child(self.same), "True")
            source.tell("ok")
            thread.join()

    def test_a_prefetch_of_the_parent_is_refused_and_not_waited_for(self):
        loader = self.opened.prefetch()
        name = loader.names()[0]

        def take():
            try:
                loader.take(name)
            except tensorfs.SafetensorError as e:
                loader.close()
                return str(e)

        self.assertIn("belongs to the process that started it", in_child(take))
        loader.close()

    def test_workers_of_a_pool_read_from_one_handle(self):
        global shared
        shared = self.opened
        self.addCleanup(globals().pop, "shared")
        with multiprocessing.get_context("fork").Pool(4) as pool:
            found = pool.map_async(read_shared, list(self.right) * 5).get(SECONDS)
        self.assertEqual(found, [data for _, _, data in self.right.values()] * 5)

    @needs_torch
    def test_workers_of_a_data_loader_read_from_one_handle(self):
        import torch

        opened = tensorfs.safe_open(self.folder, "pt")
        names = opened.keys()
        right = {name: tensor.numpy().tobytes() for name, tensor in opened.get_tensors().items()}

        class Tensors(torch.utils.data.Dataset):
            def __len__(self):
                return len(names)

            def __getitem__(self, at):
                return at, opened.get_tensor(names[at])

        loader = torch.utils.data.DataLoader(
            Tensors(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=SECONDS
        )
        seen = 0
        for at, tensor in loader:
            self.assertEqual(tensor.numpy().tobytes(), right[names[at]])
            seen += 1
        self.assertEqual(seen, len(names))


def read_shared(name):
    return shared.get_tensor(name).tobytes()


# Loads from a stalled source. Prints the outcome, and then that its threads have ended.
INTERRUPTED = """
import os, signal, sys, time
import numpy as np
import tensorfs

def threads():
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except (FileNotFoundError, ProcessLookupError):
            pass
    return [name for name in names if name.startswith("tensorfs")]

path, how = sys.argv[1:]
opened = tensorfs.safe_open(path, "np", io_timeout=0)
name = max(opened.keys(), key=lambda name: opened.get_tensor_metadata(name).nbytes)
into = {name: np.zeros(opened.get_slice(name).get_shape(), np.float32)}

def prefetched():
    # After Ctrl-C between the call and the block, nobody would close the loader.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with opened.prefetch() as loader:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        loader.take(name)

def walk():
    for name in opened.keys():
        opened.get_tensor(name)

ways = {
    "walk": walk,
    "get_tensor": lambda: opened.get_tensor(name),
    "get_slice": lambda: opened.get_slice(name)[1:],
    "get_tensors": lambda: opened.get_tensors(),
    "tensors": lambda: list(opened.tensors()),
    "prefetch": prefetched,
    "safe_open": lambda: tensorfs.safe_open(path, "np", io_timeout=0),
    "load_into": lambda: tensorfs.load_into(into, path, strict=False, io_timeout=0),
}
signal.signal(signal.SIGINT, signal.default_int_handler)
print("ready", flush=True)
sys.stdin.readline()
try:
    got = ways[how]()
    print("loaded", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
if sys.stdin.readline() == "again\\n":
    while threads():
        time.sleep(0.01)
    print("no threads", flush=True)
    print(len(opened.get_tensors()), flush=True)
os._exit(0)
"""


class Interrupts(TestCase):
    def interrupted(self, how):
        folder = hf_set(self.tmp / how)
        with FaultFs(folder) as source, source.lifted():
            child = subprocess.Popen(
                [sys.executable, "-c", INTERRUPTED, str(source.path), how],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
            killer = threading.Timer(SECONDS, child.kill)
            killer.start()
            try:
                self.assertEqual(child.stdout.readline(), "ready\n")
                # The header is read already. All other reads stall.
                source.tell("stall", "*.safetensors")
                child.stdin.write("go\n")
                child.stdin.flush()
                wait_until(source.parked, SECONDS, "a read that stalls")
                child.send_signal(signal.SIGINT)
                self.assertEqual(child.stdout.readline(), "interrupted\n")
                source.tell("ok")
                child.stdin.write("again\n")
                child.stdin.close()
                self.assertEqual(child.stdout.readline(), "no threads\n")
                self.assertEqual(child.stdout.readline(), f"{len(tensorfs.load_file(folder, 'dlpack'))}\n")
            finally:
                killer.cancel()
                if child.poll() is None:
                    child.kill()
                    source.tell("ok")
                child.wait()
                child.stdout.close()
        self.assertEqual(child.returncode, 0)


def for_each_way():
    for how in ("walk", "get_tensor", "get_slice", "get_tensors", "tensors", "prefetch", "load_into", "safe_open"):
        name = f"test_{how}_of_a_source_that_stalls_ends_with_ctrl_c_and_leaves_no_thread"
        setattr(Interrupts, name, lambda self, how=how: self.interrupted(how))


for_each_way()


class Opening(TestCase):
    def test_paths_of_a_file_system_that_does_not_answer_are_given_up_in_time(self):
        folder = hf_set(self.tmp / "hf")
        file = "model-00001-of-00003.safetensors"
        for request in ("lookup", "getattr", "open"):
            with self.subTest(request=request), FaultFs(folder) as source, source.lifted():
                source.tell(f"stall-{request}", "*")
                path = source.path / file
                for what in (source.path, path, [path], {"layers.1.rows": path}):
                    with self.assertRaisesRegex(TimeoutError, "does not answer"):
                        tensorfs.safe_open(what, "dlpack", io_timeout=0.2)
                self.assertGreater(source.parked(), 0)

    def test_what_is_not_there_is_said_as_safetensors_says_it(self):
        missing, there = self.tmp / "missing.safetensors", hf_set(self.tmp / "hf") / "model-00001-of-00003.safetensors"
        for what in (missing, os.fsencode(missing).decode(), [there, missing], {"layers.1.rows": there, "b": missing}):
            with self.assertRaises(FileNotFoundError) as raised:
                tensorfs.safe_open(what, "dlpack")
            self.assertEqual(str(raised.exception), f"No such file or directory: {missing}")


    @unittest.skipUnless(os.geteuid() == 0, "only root can become a user who has no thread left")
    def test_that_no_thread_can_be_started_is_said(self):
        code = """
import os, resource, sys
import tensorfs

os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    tensorfs.safe_open(sys.argv[1], "dlpack")
except OSError as e:
    print(e)
"""
        self.assertIn("cannot open: start a thread: Resource temporarily", python(code, self.tmp))


class Imports(TestCase):
    def test_the_package_needs_neither_numpy_nor_torch_nor_safetensors(self):
        folder = hf_set(self.tmp / "hf")
        code = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "torch", "safetensors", "ml_dtypes"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import tensorfs, tensorfs.torch, tensorfs.numpy
tensors = tensorfs.load_file(sys.argv[1], "dlpack")
buffers = {name: bytearray(tensor.nbytes) for name, tensor in tensors.items()}
tensorfs.load_into(buffers, sys.argv[1])
assert all(tensors[name].tobytes() == data for name, data in buffers.items())
try:
    tensorfs.safe_open(sys.argv[1], "np").get_tensors()
except ImportError as e:
    print(e)
try:
    tensorfs.safe_open(sys.argv[1] + "/config.json", "dlpack")
except tensorfs.SafetensorError as e:
    print(e.kind)
"""
        self.assertEqual(python(code, folder), "numpy is blocked\nheader_too_large\n")

    def test_importing_the_package_imports_none_of_them(self):
        code = "import sys, tensorfs; print({'numpy', 'torch', 'safetensors'} & set(sys.modules))"
        self.assertEqual(python(code), "set()\n")

    def test_an_error_is_caught_by_the_class_of_either_package_and_is_pickled(self):
        code = """
import pickle, sys, tensorfs
try:
    tensorfs.safe_open(sys.argv[1], "dlpack")
except tensorfs.SafetensorError as e:
    assert "safetensors" not in sys.modules
    assert pickle.loads(pickle.dumps(e)).kind == e.kind
import safetensors
try:
    tensorfs.safe_open(sys.argv[1], "dlpack")
except safetensors.SafetensorError as e:
    assert isinstance(e, tensorfs.SafetensorError)
    again = pickle.loads(pickle.dumps(e))
    assert (type(again), str(again), again.kind, again.path) == (type(e), str(e), e.kind, e.path)
    print(e.kind)
"""
        (self.tmp / "bad.safetensors").write_bytes(b"x")
        self.assertEqual(python(code, self.tmp / "bad.safetensors"), "too_short\n")


class Failures(TestCase):
    def test_a_read_that_fails_is_an_oserror_with_its_number_file_and_tensor(self):
        import errno

        folder = hf_set(self.tmp / "hf")
        with FaultFs(folder) as source, source.lifted():
            opened = tensorfs.safe_open(source.path, "np", io_timeout=5)
            name = "layers.2.rows"
            source.tell("eio", "*.safetensors")
            with self.assertRaises(OSError) as caught:
                opened.get_tensor(name)
            error = caught.exception
            self.assertEqual(error.errno, errno.EIO)
            self.assertTrue(error.filename.endswith("model-00002-of-00003.safetensors"), error.filename)
            self.assertIn(name, str(error))
            with self.assertRaises(OSError) as caught:
                opened.get_tensors()
            self.assertIn("more", str(caught.exception))
            source.tell("ok")
            with tensorfs.safe_open(folder, "np") as right:
                np.testing.assert_array_equal(opened.get_tensor(name), right.get_tensor(name))

    def test_a_source_that_does_not_answer_is_a_timeout(self):
        folder = hf_set(self.tmp / "hf")
        with FaultFs(folder) as source, source.lifted():
            # The timeout also applies to opening, which must succeed.
            opened = tensorfs.safe_open(source.path, "np", io_timeout=2)
            source.tell("stall", "*.safetensors")
            with self.assertRaises(TimeoutError):
                opened.get_tensors()

    def test_memory_that_was_given_is_left_alone_once_a_source_has_not_answered_in_time(self):
        length = 4 << 20
        save_file({"a": np.zeros(length, np.uint8)}, self.tmp / "model.safetensors")
        with FaultFs(self.tmp) as source, source.lifted():
            loader = _settings.loader(io_timeout=0.5)
            opened = _tensorfs.Checkpoint.open(source.path / "model.safetensors", None)
            ((_, start, _),) = opened.pieces(0)
            around = np.zeros(length + 4096, np.uint8)
            # The memory has the same offset in a page as the bytes in the file, so that they can be read directly into
            # it.
            skip = (start - around.ctypes.data) % 4096
            into = around[skip : skip + length]
            plan = loader.plan(opened, [(0, None, None, into.ctypes.data)])
            source.tell("stall", "*.safetensors")
            owner = threading.Event()
            ends = weakref.ref(owner)
            with self.assertRaises(TimeoutError):
                loader.fill(opened, plan, [(into.ctypes.data, length, owner)])
            del owner
            into[:] = 7
            source.tell("ok")
            # If a thread drops an owner without the GIL, the next call frees the owner.
            wait_until(lambda: loader.timeout and ends() is None, SECONDS, "the end of late reads")
            self.assertTrue((into == 7).all())

    def test_a_file_that_was_replaced_is_not_mixed_with_the_new_one(self):
        folder = hf_set(self.tmp / "hf")
        opened = tensorfs.safe_open(folder, "np")
        shard = folder / "model-00001-of-00003.safetensors"
        shard.write_bytes(shard.read_bytes()[::-1])
        with self.assertRaises(tensorfs.SafetensorError) as caught:
            opened.get_tensors()
        self.assertEqual((caught.exception.kind, caught.exception.path), ("changed", str(shard)))

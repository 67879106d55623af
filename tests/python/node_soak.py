"""A day of a node's life in minutes: models come, change and go, workers are killed and stopped, the service is
restarted, upgraded, killed and reloaded, a disk fills, and a source stalls under restarts and upgrades, while readers
map and read and compare every byte.

    python tests/python/node_soak.py --seconds 1200
    python tests/python/node_soak.py --seconds 60 --readers 4

The name of each tensor says which bytes it has, so that a reader can check any file without other knowledge. The exit
status is not 0 after a wrong byte, a reader that hangs, an error in a quiet time, a model that does not appear, or a
service that does not come back. A reader must not wait for a stalled source longer than `STALL_SECONDS`. The script
needs root, and gives the service the capabilities and the system calls of its unit.
"""

import argparse
import collections
import contextlib
import errno
import json
import mmap
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from checkpoints import FORMAT, write_weight_map
from faults import FaultFs
from mounts import BIN, detach, mount_table, process_gone, run, wait_until
from services import Service, mount_config
from soak import blocks, pattern, write_header

FILE = "model.safetensors"
DAY = 24 * 3600
SHARDS = 3
TENSORS_PER_SHARD = 4
# A reader that prints nothing for this number of seconds hangs. A read of a stopped worker waits until the worker is
# replaced.
HANG_SECONDS = 90
# Seconds within which a model or the service has to come, on a loaded machine.
COME_SECONDS = 60
WATCHDOG = 4
# Longest time, in seconds, for which a reader may wait for a stalled source: see docs/operate/node.md.
STALL_SECONDS = 45
# Requests, beside reads, that a stalled source may leave without an answer.
METADATA = ["stall-lookup", "stall-getattr", "stall-readdir", "stall-open", "stall-statfs"]
# Errors that a reader may get while its worker or its source changes.
LOST = {"ENOTCONN", "ECONNABORTED", "ENODEV"}
EXPECTED = {errno.EIO, errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT, errno.ESTALE, errno.ENODEV}


def write_model(folder, version, length):
    """Writes the shards of a model. The names of tensors say their content: `v7.t3` has the bytes of the number 7 * 64
    + 3."""
    folder.mkdir()
    share = length // SHARDS // TENSORS_PER_SHARD // 4 * 4 + 4
    shards = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        numbers = range(shard * TENSORS_PER_SHARD, (shard + 1) * TENSORS_PER_SHARD)
        shards[name] = [f"v{version}.t{number}" for number in numbers]
        with open(folder / name, "wb") as file:
            write_header(file, {tensor: ([share // 4], share) for tensor in shards[name]}, FORMAT)
            for number in numbers:
                for start, end in blocks(share):
                    pattern(version * 64 + number, start, end).tofile(file)
    write_weight_map(folder, shards)


class WrongByte(Exception):
    """A tensor has other bytes than its name says."""


class Reader:
    """The code of a reading process. It prints a line of JSON for each file that it has read."""

    def __init__(self, targets, seed):
        self.targets = targets
        self.random = random.Random(seed)
        self.mapped = seed % 2 == 1

    def run(self):
        while True:
            report = {"bytes": 0, "reads": 0, "error": 0, "wrong": ""}
            begin = time.monotonic()
            try:
                self.read_one(report)
            except OSError as error:
                report["error"] = error.errno
                # A missing mount answers at once, so this waits a little.
                time.sleep(0.02)
            except WrongByte as wrong:
                report["wrong"] = str(wrong)
            report["seconds"] = time.monotonic() - begin
            print(json.dumps(report), flush=True)

    def read_one(self, report):
        target = self.random.choice(self.targets)
        models = sorted(os.listdir(target))
        if not models:
            # If nothing is mounted on the mount point, listing it does not count as a read.
            time.sleep(0.02)
            return
        path = os.path.join(target, self.random.choice(models), FILE)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            parts = self.parts(descriptor, path)
            report["reads"] += 1
            # Some files stay open for several reads, and so during changes and restarts.
            for _ in range(self.random.choice([1, 1, 1, 20])):
                self.compare(descriptor, path, parts, report)
        finally:
            os.close(descriptor)

    def parts(self, descriptor, path):
        """Start, end and number of each tensor."""
        length = int.from_bytes(self.pread(descriptor, 8, 0, path), "little")
        if length > 1 << 20:
            raise WrongByte(f"{path}: a header of {length} bytes")
        header = json.loads(self.pread(descriptor, length, 8, path))
        header.pop("__metadata__", None)
        versions = {name.partition(".")[0] for name in header}
        if len(versions) != 1 or len(header) != SHARDS * TENSORS_PER_SHARD:
            raise WrongByte(f"{path}: tensors of {sorted(versions)}: {len(header)}")
        parts = []
        for name, entry in header.items():
            version, tensor = name.split(".")
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            parts.append((start, end, int(version[1:]) * 64 + int(tensor[1:])))
        return parts

    def compare(self, descriptor, path, parts, report):
        start, end, number = self.random.choice(parts)
        begin = self.random.randrange(start, end)
        stop = min(end, begin + self.random.choice([1, 4096, 100_000, 1 << 20]))
        if self.mapped:
            # `mmap` with length 0 would hide an error of its stat, and report an invalid argument.
            length = os.fstat(descriptor).st_size
            with mmap.mmap(descriptor, length, prot=mmap.PROT_READ) as mapped:
                data = mapped[begin:stop]
        else:
            data = self.pread(descriptor, stop - begin, begin, path)
        if data != pattern(number, begin - start, stop - start).tobytes():
            raise WrongByte(f"{path}: bytes {begin} to {stop} of number {number}")
        report["bytes"] += stop - begin
        report["reads"] += 1

    def pread(self, descriptor, length, offset, path):
        parts = []
        while length > 0:
            data = os.pread(descriptor, length, offset)
            if not data:
                raise WrongByte(f"{path}: ends at {offset}")
            parts.append(data)
            offset, length = offset + len(data), length - len(data)
        return b"".join(parts)


class Readers:
    """Reader processes and their figures. A process that a SIGBUS has ended is replaced. A process that prints nothing
    for `hang` seconds hangs."""

    def __init__(self, targets, n, hang=HANG_SECONDS):
        self.targets = targets
        self.hang = hang
        self.figures = collections.Counter()
        self.errors = collections.Counter()
        self.wrong = []
        self.hung = []
        self.longest = 0.0
        self.processes = {}
        for seed in range(n):
            self._start(seed)

    def _start(self, seed):
        words = [sys.executable, __file__, "--reader", str(seed), *map(str, self.targets)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE)
        os.set_blocking(process.stdout.fileno(), False)
        self.processes[seed] = [process, time.monotonic(), b""]

    def collect(self, seconds):
        """Collects the lines of the readers for `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            rest = deadline - time.monotonic()
            streams = {p.stdout: seed for seed, (p, *_) in self.processes.items()}
            ready = select.select(list(streams), [], [], max(rest, 0))[0]
            for stream in ready:
                self._take(streams[stream], stream)
            for seed, (process, heard, _) in list(self.processes.items()):
                if time.monotonic() - heard > self.hang:
                    self.hung.append(f"reader {seed}: {stack_of(process.pid)}")
                    process.kill()
                    self._start(seed)
            if rest <= 0:
                return

    def _take(self, seed, stream):
        entry = self.processes[seed]
        data = stream.read()
        if data == b"":
            code = entry[0].wait()
            self.figures["ended by SIGBUS"] += code == -signal.SIGBUS
            if code != -signal.SIGBUS:
                self.wrong.append(f"reader {seed} ended with {code}")
            self._start(seed)
            return
        entry[1] = time.monotonic()
        *lines, entry[2] = (entry[2] + (data or b"")).split(b"\n")
        for line in lines:
            report = json.loads(line)
            self.figures["bytes"] += report["bytes"]
            self.figures["reads"] += report["reads"]
            self.longest = max(self.longest, report["seconds"])
            if report["error"]:
                self.errors[errno.errorcode.get(report["error"], report["error"])] += 1
                if report["error"] not in EXPECTED:
                    self.wrong.append(f"reader {seed}: {os.strerror(report['error'])}")
            if report["wrong"]:
                self.wrong.append(report["wrong"])

    def stop(self):
        for process, *_ in self.processes.values():
            process.kill()
        for process, *_ in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(HANG_SECONDS)


def stack_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stack").read_text().splitlines()[0]
    return "gone"


class Life:
    """The node: a store, the service, and the events that happen to them."""

    def __init__(self, folder, options):
        self.folder = folder
        self.options = options
        self.random = random.Random(options.seed)
        self.store, self.other = folder / "store", folder / "other"
        self.disk = folder / "disk"
        targets = (folder / "srv" / name for name in ("store", "other", "far"))
        for path in (self.store, self.other, self.disk, folder / "behind", *targets):
            path.mkdir(parents=True)
        # A second source, which stalls, with its own readers.
        self.faults = FaultFs(folder / "behind", options.seconds + 3600)
        self.far = folder / "srv/far"
        self.far_readers = None
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", self.disk], check=True)
        self.version = 0
        self.umask = 0o022
        self.counts = collections.Counter()
        self.longest = collections.defaultdict(float)
        self.failures = []
        self.peak = collections.defaultdict(int)
        self.service = None
        self.binary = folder / "program" / "tensorfs"
        self.binary.parent.mkdir()
        shutil.copy(BIN, self.binary)
        for _ in range(options.models):
            self.new_model(self.store)
        for _ in range(2):
            self.new_model(self.other)
            self.new_model(folder / "behind")
        self.readers = None

    def config(self):
        disk = f"index-dir={self.disk}/index,log={self.disk}/log"
        other = f"assemble={self.disk}/copies,assemble-size=24M,umask={self.umask:03o},io-timeout=10"
        return (
            f'[service]\nwatchdog = {WATCHDOG}\n[defaults]\noptions = "{disk}"\n'
            + mount_config("store", self.store, self.folder / "srv/store")
            + mount_config("other", self.other, self.folder / "srv/other", other)
            + mount_config("far", self.faults.path, self.far, "io-timeout=3")
        )

    def targets(self):
        return [self.folder / "srv/store", self.folder / "srv/other"]

    def new_model(self, place):
        self.version += 1
        folder = place / f".new-{self.version}"
        write_model(folder, self.version, int(self.options.mb * (1 << 20)))
        return folder.rename(place / f"model-{self.version}")

    def models(self):
        return sorted(path for path in self.store.iterdir() if path.name.startswith("model-"))

    # The service.

    def start(self):
        (self.folder / "notify").unlink(missing_ok=True)
        self.service = Service(self.folder, self.config(), binary=self.binary)
        self.service.__enter__()
        self.service.wait_until_ready()

    def end(self):
        if self.service:
            self.service.__exit__()
            self.service = None

    def collect(self, seconds):
        """Collects the lines of all readers for `seconds`."""
        self.far_readers.collect(0)
        self.readers.collect(seconds)

    def wait_for(self, what, condition):
        """Waits until `condition` is true, while readers read. Records the time that this takes."""
        begin = time.monotonic()
        while not condition():
            self.collect(0.02)
            if time.monotonic() - begin > COME_SECONDS:
                self.failures.append(f"not within {COME_SECONDS} s: {what}; status: {self.service.manager.status()}")
                return
        self.longest[what] = max(self.longest[what], time.monotonic() - begin)

    def serves(self, target):
        """Whether a new open of a model in `target` works."""
        try:
            for model in os.listdir(target):
                with open(target / model / FILE, "rb") as file:
                    return len(file.read(8)) == 8
        except OSError:
            pass
        return False

    def all_serve(self):
        return all(self.serves(target) for target in self.targets())

    def is_shown(self, model):
        return (self.folder / "srv/store" / model.name / FILE).exists()

    # Events.

    def model_comes(self):
        model = self.new_model(self.store)
        self.wait_for("a new model is shown", lambda: self.is_shown(model))

    def model_is_downloaded(self):
        """A model appears file by file, as in a download."""
        self.version += 1
        whole = self.folder / "whole"
        write_model(whole, self.version, int(self.options.mb * (1 << 20)))
        place = self.store / f"model-{self.version}"
        place.mkdir()
        for path in sorted(whole.iterdir(), key=lambda path: self.random.random()):
            with open(path, "rb") as source, open(place / f"{path.name}.incomplete", "wb") as copy:
                while data := source.read(1 << 18):
                    copy.write(data)
                    self.collect(0.01)
            (place / f"{path.name}.incomplete").rename(place / path.name)
        shutil.rmtree(whole)
        self.wait_for("a downloaded model is shown", lambda: self.is_shown(place))

    def model_changes(self):
        """A new version takes the place of another one, by two renames."""
        old = self.random.choice(self.models())
        new, aside = self.new_model(self.store), self.folder / "aside"
        old.rename(aside)
        new.rename(old)
        version = f"v{self.version}."
        shutil.rmtree(aside)

        def is_new():
            with contextlib.suppress(OSError), open(self.folder / "srv/store" / old.name / FILE, "rb") as file:
                return version.encode() in file.read(1 << 16)
            return False

        self.wait_for("a changed model is shown", is_new)

    def model_goes(self):
        if len(self.models()) > 2:
            gone = self.random.choice(self.models())
            aside = gone.rename(self.folder / "aside")
            shutil.rmtree(aside)
            self.wait_for("a model that is gone vanishes", lambda: not self.is_shown(gone))

    def worker_is_killed(self):
        workers = self.service.workers()
        if workers:
            os.kill(self.random.choice(sorted(workers.values())), signal.SIGKILL)
            self.wait_for("new opens work after a kill of a worker", self.all_serve)

    def worker_is_stopped(self):
        workers = self.service.workers()
        if workers:
            pid = self.random.choice(sorted(workers.values()))
            os.kill(pid, signal.SIGSTOP)
            self.wait_for("a stopped worker is replaced", lambda: process_gone(pid))
            self.wait_for("new opens work after a stop of a worker", self.all_serve)

    @contextlib.contextmanager
    def nothing_lost(self, what):
        """A block in which no reader may lose its files."""
        self.wait_for("all mounts serve", self.all_serve)
        # Files that were opened before the last kill still fail.
        self.collect(1)
        before = self.lost()
        yield
        self.wait_for(f"new opens work after {what}", self.all_serve)
        self.collect(1)
        if lost := self.lost() - before:
            self.failures.append(f"{what}: {lost} readers lost their files: {dict(self.readers.errors)}")

    def lost(self):
        """Number of readers that have lost a connection so far."""
        errors = sum(n for name, n in self.readers.errors.items() if name in LOST)
        return errors + self.readers.figures["ended by SIGBUS"]

    def service_restarts(self):
        """Restarts the service as `systemctl restart` does. The mounts go on."""
        with self.nothing_lost("a restart"):
            times = self.service.manager.count("READY=1")
            self.service.restart()
            self.wait_for("a restart ends", lambda: self.service.manager.count("READY=1") > times)

    def service_is_upgraded(self):
        """Replaces the file of the program, and reloads the service, which runs the new program."""
        with self.nothing_lost("an upgrade"):
            new = self.binary.with_name("new")
            shutil.copy(BIN, new)
            new.rename(self.binary)
            times = self.service.manager.count("READY=1")
            self.service.reload()
            self.wait_for("an upgrade ends", lambda: self.service.manager.count("READY=1") > times)

    def service_stops_and_starts(self):
        if self.service.stop() != 0:
            self.failures.append(f"the service ended badly: {self.service.log()[-500:]}")
        self.end()
        self.start()
        self.wait_for("new opens work after a stop and a start", self.all_serve)

    def service_is_killed(self):
        """Kills all processes of the service at once, as systemd does after a SIGKILL of the supervisor."""
        pids = [*self.service.workers().values(), self.service.process.pid]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.service.process.wait(COME_SECONDS)
        wait_until(lambda: all(map(process_gone, pids)), COME_SECONDS, "killed processes end")
        # `end` is not called, because it would remove the dead mounts. The next service has to do that.
        self.service.manager.close()
        self.start()
        self.wait_for("new opens work after a kill of the service", self.all_serve)

    def service_reloads(self):
        self.umask ^= 0o027 ^ 0o022
        times = self.service.manager.count("READY=1")
        pid = self.service.workers().get("store")
        self.service.reload(self.config())
        self.wait_for("a reload ends", lambda: self.service.manager.count("READY=1") > times)
        self.wait_for("new opens work after a reload", self.all_serve)
        if pid and self.service.workers().get("store") != pid:
            self.failures.append("a reload touched a mount that did not change")

    def config_is_wrong(self):
        times = self.service.manager.count("READY=1")
        self.service.reload(self.config() + "[[mount]]\nname = 7\n")
        self.wait_for("a wrong config is refused", lambda: self.service.manager.count("READY=1") > times)
        self.service.file.write_text(self.config())

    def disk_fills(self):
        """Fills the disk of indexes, logs and copies for a while."""
        if not os.path.ismount(self.disk):
            self.failures.append(f"{self.disk} is no disk of its own")
            return
        with contextlib.suppress(OSError), open(self.disk / "filler", "wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        self.collect(0.5)
        self.model_comes()
        self.worker_is_killed()
        (self.disk / "filler").unlink()

    # A source that stalls.

    def stall(self, words):
        """Stalls these requests. Without words it stalls all requests, even those that close a file."""
        if not words:
            os.kill(self.faults.pid, signal.SIGSTOP)
        for word in words:
            self.faults.tell(word, "*")
        # Makes the next reads read the source, and not the page cache.
        if words:
            Path("/proc/sys/vm/drop_caches").write_text("1")

    def answer_again(self):
        os.kill(self.faults.pid, signal.SIGCONT)
        self.faults.tell("ok")

    def stalled_source(self, words, replace):
        """Calls `replace` while the source stalls. No reader of this source hangs, other readers lose nothing, and the
        mount of the source comes back by itself."""
        self.wait_for("the source that stalls serves", lambda: self.serves(self.far))
        self.counts["stalls of " + ("everything" if not words else "reads" if words == ["stall"] else "requests")] += 1
        if self.options.verbose:
            print(f"      {words}", flush=True)
        self.stall(words)
        try:
            # Some readers wait before the replacement, and others while no process serves the mount.
            self.collect(self.random.uniform(0, 1.5))
            replace(self)
            begin = time.monotonic()
            look = subprocess.Popen(["ls", self.far], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self.wait_for("ls of a source that stalls ends", lambda: look.poll() is not None)
            if time.monotonic() - begin > STALL_SECONDS:
                self.failures.append(f"ls of a source that stalls took longer than {STALL_SECONDS} s")
            # These programs look at all mounts of the node, of which some may be dead.
            run(self.binary, "status")
            outcome = run(self.binary, "serve", "--check", "--config", self.service.file)
            if outcome.code:
                self.failures.append(f"serve --check while a source stalls: {outcome.stderr}")
            self.collect(self.random.uniform(0, 6))
        finally:
            self.answer_again()
        self.wait_for("a source that stalled serves again", lambda: self.serves(self.far))

    def some_requests(self):
        return self.random.sample([*METADATA, "stall"], self.random.randrange(1, len(METADATA) + 2))

    def source_stops_at_a_restart(self):
        self.stalled_source([], Life.service_restarts)

    def source_stops_at_an_upgrade(self):
        self.stalled_source([], Life.service_is_upgraded)

    def source_stalls_at_a_restart(self):
        self.stalled_source(self.some_requests(), Life.service_restarts)

    def source_stalls_at_an_upgrade(self):
        self.stalled_source(self.some_requests(), Life.service_is_upgraded)

    def reads_stall_at_a_restart(self):
        self.stalled_source(["stall"], Life.service_restarts)

    def reads_stall_at_an_upgrade(self):
        self.stalled_source(["stall"], Life.service_is_upgraded)

    EVENTS = {
        source_stops_at_a_restart: 1, source_stops_at_an_upgrade: 1, source_stalls_at_a_restart: 1,
        source_stalls_at_an_upgrade: 1, reads_stall_at_a_restart: 1, reads_stall_at_an_upgrade: 1,
        model_comes: 6, model_is_downloaded: 3, model_changes: 6, model_goes: 6, worker_is_killed: 4,
        worker_is_stopped: 1, service_restarts: 3, service_is_upgraded: 2, service_stops_and_starts: 1,
        service_is_killed: 1, service_reloads: 2, config_is_wrong: 1, disk_fills: 1,
    }

    def measure(self):
        """Peaks of resident memory in MB."""
        pids = {"supervisor": self.service.process.pid, **self.service.workers()}
        for name, pid in pids.items():
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                kilobytes = int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
                self.peak[name] = max(self.peak[name], kilobytes // 1024)

    def run(self):
        self.faults.start()
        self.start()
        self.readers = Readers(self.targets(), self.options.readers)
        self.far_readers = Readers([self.far], 3, STALL_SECONDS)
        begin = time.monotonic()
        interval = self.options.seconds / max(self.options.events, 1)
        # Each kind of event happens once, and after that the kinds are chosen by weight.
        order = self.random.sample(list(self.EVENTS), len(self.EVENTS))
        while (elapsed := time.monotonic() - begin) < self.options.seconds and not self.failures:
            self.collect(self.random.uniform(0.2, 1.8) * interval)
            if not order:
                order = self.random.choices(list(self.EVENTS), self.EVENTS.values(), k=1)
            event = order.pop()
            hour = elapsed / self.options.seconds * DAY / 3600
            if self.options.verbose:
                print(f"{int(hour):02}:{int(hour * 60) % 60:02} {event.__name__}", flush=True)
            event(self)
            self.counts[event.__name__.replace("_", " ")] += 1
            self.measure()
        self.quiet()

    def quiet(self):
        """A time without events, in which every read must succeed."""
        self.wait_for("all mounts serve in the end", lambda: self.all_serve() and self.serves(self.far))
        # Reads of files that were opened before may still fail.
        self.collect(3)
        self.readers.stop()
        self.far_readers.collect(0)
        self.far_readers.stop()
        wrong = self.readers.wrong
        last = Readers([*self.targets(), self.far], self.options.readers)
        last.collect(3)
        last.stop()
        if last.errors:
            self.failures.append(f"errors in a quiet time: {dict(last.errors)}")
        self.readers.wrong = wrong + last.wrong
        self.readers.hung += last.hung
        self.readers.figures.update(last.figures)
        if self.service.stop() != 0:
            self.failures.append("the service ended badly")

    def clean_up(self):
        if self.faults.running():
            self.answer_again()
        for readers in filter(None, (self.readers, self.far_readers)):
            readers.stop()
        self.end()
        self.faults.stop()
        for entry in reversed(mount_table()):
            if entry.path.startswith(f"{self.folder}/"):
                detach(entry.path)
        shutil.rmtree(self.folder, ignore_errors=True)

    def report(self):
        figures = self.readers.figures
        print(f"{figures['reads']} reads compared, {figures['bytes'] / 1e9:.2f} GB, wrong: {len(self.readers.wrong)}")
        print(f"hung readers: {len(self.readers.hung)}, longest time for one file: {self.readers.longest:.2f} s")
        print(f"errors that readers met: {dict(self.readers.errors)}, ended by SIGBUS: {figures['ended by SIGBUS']}")
        far = self.far_readers
        print(
            f"source that stalls: {far.figures['reads']} reads compared, wrong: {len(far.wrong)}, hung readers: {len(far.hung)}, "
            f"longest time for one file: {far.longest:.2f} s, errors: {dict(far.errors)}, "
            f"ended by SIGBUS: {far.figures['ended by SIGBUS']}"
        )
        print("events: " + ", ".join(f"{n} x {name}" for name, n in sorted(self.counts.items())))
        for what, seconds in sorted(self.longest.items()):
            print(f"longest time until {what}: {seconds:.2f} s")
        print("peak memory: " + ", ".join(f"{name} {megabytes} MB" for name, megabytes in sorted(self.peak.items())))
        problems = [*self.failures]
        for readers in (self.readers, far):
            problems += [*readers.wrong[:10], *readers.hung[:10]]
        for problem in problems:
            print(f"FAILED: {problem}")
        return 1 if problems else 0


def main():
    if sys.argv[1:2] == ["--reader"]:
        Reader(sys.argv[3:], int(sys.argv[2])).run()
    parser = argparse.ArgumentParser(prog="node_soak.py")
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--events", type=int, help="how many events in that time; the default is one in 2 seconds")
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--mb", type=float, default=2, help="size of a model")
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", default=None)
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    options.events = options.events or int(options.seconds / 2)
    life = Life(Path(tempfile.mkdtemp(prefix="tensorfs-test-", dir=options.folder)), options)
    try:
        life.run()
        return life.report()
    finally:
        life.clean_up()


if __name__ == "__main__":
    sys.exit(main())

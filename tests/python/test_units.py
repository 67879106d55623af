"""Mounts with the capabilities and the system calls of the shipped units, and with fewer capabilities."""

import contextlib
import os
import re
import shutil
import time

import checkpoints
from confinement import CAPABILITIES, Unit, confined_by, filters_work, without_capability
from mounts import Mount, needs_root, tensorfs, wait_until
from object_server import ObjectServer
from services import PATIENCE, ServiceCase, mount_config

UNITS = ("tensorfs.service", "tensorfs@.service")
OTHER_USER = 65534
MODEL = "model/model.safetensors"

APPLIED = {
    "CapabilityBoundingSet", "MemoryDenyWriteExecute", "NoNewPrivileges", "RestrictAddressFamilies",
    "RestrictNamespaces", "SystemCallErrorNumber", "SystemCallFilter", "UMask",
}
# These need a service manager, a cgroup, or more rights than a test may have.
NOT_APPLIED = {
    "DeviceAllow", "DevicePolicy", "LimitMEMLOCK", "LimitNOFILE", "LockPersonality",
    "RestrictRealtime", "RestrictSUIDSGID", "SystemCallArchitectures",
}
# Sources may be URLs, on any machine.
NOT_SET = {"IPAddressAllow", "IPAddressDeny"}
RESTRICTIONS = r"Capab|Device|IP|Limit|Lock|Mem|NoNew|Restrict[A-Z]\w+s$|RestrictR|RestrictSUID|System|UMask"


@needs_root
class Units(ServiceCase):
    def store(self, name):
        """A store with a checkpoint of another user, the bytes that a mount shows of it, and one of its shards."""
        folder = checkpoints.hf_set(self.tmp / name / "model", megabytes=1)
        shard = sorted(folder.glob("*.safetensors"))[-1]
        whole = checkpoints.hf_whole(folder)
        for path in folder.iterdir():
            os.chown(path, OTHER_USER, OTHER_USER)
        return folder.parent, whole, shard

    def watch_of(self, target):
        [status] = tensorfs("status", "--json", target).json()
        return status["watch"]

    def wait_until_quiet(self, shard, seconds):
        wait_until(lambda: time.time() - shard.stat().st_ctime > seconds, PATIENCE, f"{seconds} s without a change")

    def test_every_restriction_of_the_units_is_applied_here_or_known_not_to_be(self):
        for name in UNITS:
            restrictions = {key for key in Unit(name).settings if re.match(RESTRICTIONS, key)}
            self.assertEqual(restrictions - APPLIED - NOT_APPLIED, set(), name)
            self.assertEqual(restrictions & NOT_SET, set(), name)
            self.assertLessEqual(set(Unit(name).capabilities), set(CAPABILITIES), name)

    # The units allowed no addresses, and a URL in their configs could not be mounted.
    def test_a_url_is_mounted_within_each_unit(self):
        store, whole, _ = self.store("store")
        with ObjectServer() as server:
            server.public.add("models")
            for path in (store / "model").iterdir():
                server.put("models", f"model/{path.name}", path.read_bytes())
            # The name of the host needs a lookup.
            url = f"{server.url.replace('127.0.0.1', 'localhost')}/models/model"
            for name in UNITS:
                with self.subTest(unit=name), Mount(url, "cache-dir=none", preexec_fn=confined_by(name)) as m:
                    self.assert_same((m.path / "model.safetensors").read_bytes(), whole)

    def test_a_mount_of_the_unit_has_its_capabilities_and_no_more(self):
        store, whole, _ = self.store("store")
        with Mount(store, preexec_fn=confined_by("tensorfs@.service")) as m:
            self.assert_same((m.path / MODEL).read_bytes(), whole)
            fields = status_fields(m.pid)
        allowed = sum(1 << CAPABILITIES[name] for name in Unit("tensorfs@.service").capabilities)
        self.assertEqual(int(fields["CapEff"], 16), allowed & int(status_fields("self")["CapBnd"], 16))
        self.assertEqual((fields["NoNewPrivs"], fields["Seccomp"]), ("1", "2" if filters_work() else "0"))

    def test_the_units_do_not_show_a_shard_that_another_user_writes(self):
        stores = [self.store(name) for name in ("served", "single")]
        for _, _, shard in stores:
            self.enter(overwritten(shard))
        served = self.target("served")
        self.serve(mount_config("a", stores[0][0], served)).wait_until_ready()
        options = {"preexec_fn": confined_by("tensorfs@.service")}
        single = self.enter(Mount(stores[1][0], "watch=auto", **options)).path
        # Longer than the pause that counts as the end of the writing where the kernel does not tell.
        self.wait_until_quiet(stores[1][2], 1.5)
        for target in (served, single):
            self.assertFalse((target / MODEL).exists())
            self.assertEqual(self.watch_of(target)["incomplete"], [MODEL])

    def test_without_leases_files_of_others_wait_for_a_pause_and_files_with_holes_for_the_grace(self):
        store, _, shard = self.store("store")
        data = shard.read_bytes()
        dense = store / "dense"
        shutil.copytree(store / "model", dense)
        [os.chown(path, OTHER_USER, OTHER_USER) for path in dense.iterdir()]
        with open(shard, "wb", buffering=0) as file:
            # It has its length first, as a download that reserves its place.
            file.truncate(len(data))
            file.write(data[: len(data) // 4])
            m = self.enter(Mount(store, "watch=auto,watch-grace=6", preexec_fn=without_capability("CAP_LEASE")))
            wait_until(lambda: (m.path / "dense/model.safetensors").exists(), PATIENCE, "what has no hole is shown")
            self.assertFalse((m.path / MODEL).exists())
            watch = self.watch_of(m.path)
            self.assertEqual((watch["incomplete"], watch["writers_known"]), ([MODEL], False))
            self.assertEqual(m.log().count("CAP_LEASE is missing"), 1, m.log())
            file.write(data[len(data) // 4 :])
        wait_until(lambda: (m.path / MODEL).exists(), PATIENCE, "the whole file is shown")
        self.assert_same((m.path / MODEL).read_bytes(), checkpoints.hf_whole(store / "model"))


def status_fields(pid):
    with open(f"/proc/{pid}/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file)


@contextlib.contextmanager
def overwritten(shard):
    """A writer of `shard`: its second half is not there yet."""
    data = shard.read_bytes()
    half = len(data) // 2
    with open(shard, "r+b", buffering=0) as file:
        file.seek(half)
        file.write(bytes(len(data) - half))
        yield
        file.seek(half)
        file.write(data[half:])

"""The checks, in the order of the life of a machine: install, mounts, kills, upgrade, reboots, remove, purge."""

import json
import shlex
import time
from pathlib import Path

from machine import Broken

FSTAB = """
/data/checkpoints/llama /mnt/fstab tensorfs ro,nofail,allow_other,x-systemd.requires-mounts-for=/data/checkpoints 0 0
/data/checkpoints/step-9000 /mnt/auto tensorfs ro,nofail,x-systemd.automount,x-systemd.idle-timeout=5s,x-systemd.requires-mounts-for=/data/checkpoints 0 0
"""
CONFIG = """
[[mount]]
name = "llama"
source = "/data/checkpoints/llama"
target = "/srv/models/llama"
options = "allow_other"

[[mount]]
name = "step"
source = "/data/checkpoints/step-9000"
target = "/srv/models/step"
"""
# For each mount: target, checkpoint, and the unit whose daemon serves it.
INSTANCE = ("/srv/instance", "llama", "tensorfs@llama.service")
FSTAB_MOUNT = ("/mnt/fstab", "llama", "mnt-fstab.mount")
AUTOMOUNT = ("/mnt/auto", "step-9000", "mnt-auto.mount")
SERVICE = [("/srv/models/llama", "llama", "tensorfs.service"), ("/srv/models/step", "step-9000", "tensorfs.service")]
MOUNTS = [INSTANCE, FSTAB_MOUNT, AUTOMOUNT, *SERVICE]
READER = "/usr/bin/python3 /opt/guest_reader.py"


class Run:
    """Counts and prints the checks."""

    def __init__(self):
        self.passed = self.failed = 0

    def check(self, title, function, *words):
        """Runs one check, and prints its title and its result."""
        begin = time.monotonic()
        try:
            note, word = function(*words), "ok  "
            self.passed += 1
        except AssertionError as error:
            note, word = str(error), "FAIL"
            self.failed += 1
        note = f": {note}" if note else ""
        print(f"{word} {title} ({time.monotonic() - begin:.1f} s){note}", flush=True)
        return word == "ok  "

    def broken(self, message):
        self.failed += 1
        print(f"FAIL the run ends early: {message}", flush=True)

    def summary(self):
        return f"{self.passed} checks passed, {self.failed} failed"


def equal(found, expected, what):
    if found != expected:
        raise AssertionError(f"{what}: {found!r}, expected {expected!r}")


# -- without a systemd: chroot, containers, image builders


def without_systemd(run, root, in_root):
    def at_work(*words):
        try:
            return in_root(root, *words, timeout=300)
        except Broken as error:
            raise AssertionError(str(error)) from None

    def install():
        at_work("dpkg", "-i", "/root/debs/first.deb")
        equal((root / "etc/systemd/system/multi-user.target.wants/tensorfs.service").is_symlink(), True, "enabled")
        return at_work("tensorfs", "--version").strip()

    def purge():
        at_work("dpkg", "--purge", "tensorfs")
        # The parent folders of these paths belong to other packages.
        left = [path for path in root.rglob("*tensorfs*") if "root/debs" not in str(path) and path != root]
        equal(left, [], "left behind")

    run.check("the package installs in a root without systemd, and enables its service", install)
    run.check("purge leaves nothing in that root", purge)


# -- in the guest


class Guest:
    def __init__(self, machine):
        self.machine, self.run, self.wait = machine, machine.run, machine.wait
        self.readers = {}

    def active(self, unit):
        return self.run(f"systemctl is-active {unit}", whatever=True)

    def property(self, unit, name):
        return self.run(f"systemctl show --property={name} --value {unit}")

    def main_pid(self, unit):
        return int(self.property(unit, "MainPID"))

    def mounted(self, target):
        """Whether a tensorfs is mounted on `target`. Only the table of mounts is read."""
        return self.machine.result(f"grep -qF ' {target} fuse.tensorfs ' /proc/self/mounts")[0] == 0

    def daemon(self, target):
        """The pid of the daemon of a mount, from its status."""
        # `status` waits two seconds for the daemon, which is short for an emulated processor, so it is repeated.
        mounts = json.loads(self.wait(f"tensorfs status --json {target}", 20, "the status of the mount"))
        found = mounts["mounts"] if isinstance(mounts, dict) and "mounts" in mounts else mounts
        found = found[0] if isinstance(found, list) else found
        return int(found["pid"])

    def compare(self, target, model):
        """Compares every byte of the mounted file with the expected file, by mmap and by pread."""
        self.run(f"{READER} {target}/model.safetensors /data/expected/{model} /run/once.json once", 120)

    def read(self, name, target, model):
        """Starts a process that maps the file, and compares it again and again."""
        # Without a pause, five readers would take all time of an emulated processor.
        pause = 0.01 if self.machine.slower == 1 else 0.3
        self.run(f"systemctl reset-failed reader-{name} 2>/dev/null; rm -f /run/reader-{name}.json", whatever=True)
        self.run(
            f"systemd-run --quiet --unit=reader-{name} --property=KillMode=control-group --property=TimeoutStopSec=10 "
            f"{READER} {target}/model.safetensors /data/expected/{model} /run/reader-{name}.json {pause}"
        )
        self.readers[name] = 0
        self.goes_on(name)

    def state(self, name):
        return json.loads(self.run(f"cat /run/reader-{name}.json 2>/dev/null || echo '{{\"rounds\": 0}}'"))

    def goes_on(self, name, more=2):
        """Waits until the reader has compared the whole file `more` times from now on."""
        before = self.state(name)["rounds"]
        deadline = time.monotonic() + 60 * self.machine.slower
        while True:
            active = self.active(f"reader-{name}")
            state = self.state(name)
            if state["rounds"] >= before + more:
                return state
            if active != "active" or time.monotonic() > deadline:
                log = self.run(f"journalctl --no-pager -q -n 5 -u reader-{name}", whatever=True)
                raise AssertionError(f"the reader {name} is {active}, {state}: {log}")
            time.sleep(0.1)

    def end_reader(self, name):
        state = self.goes_on(name)
        self.run(f"systemctl stop reader-{name}")
        return f"{state['rounds']} rounds, {state['bytes'] >> 20} MiB compared, longest wait {state['longest_ms']:.0f} ms"

    def put(self, path, text, append=False):
        self.run(f"mkdir -p {Path(path).parent}; printf %s {shlex.quote(text)} {'>>' if append else '>'} {path}")

    def has_serve(self):
        return self.machine.result("systemctl cat tensorfs.service")[0] == 0


def all_checks(run, machine, sections):
    """Runs the checks of `sections`, in the order of SECTIONS. The package is installed before all of them."""
    machine.start()
    guest = Guest(machine)
    run.check("Debian boots with its own kernel", lambda: guest.run("uname -r; systemctl is-system-running"))
    if not run.check("the package installs", install, guest):
        raise Broken("no package, no mounts")
    run.check("the service with no mount configured does not fail", unconfigured, guest)
    run.check("doctor has no complaint", doctor, guest)
    run.check("mounts are configured: service, instance, fstab, automount", configure, guest)
    bytes_of_all(run, guest, MOUNTS, "first start")
    for name, checks in SECTIONS.items():
        if name in sections:
            checks(run, guest, MOUNTS)
    run.check("no process of the kernel or of a reader hung, and nothing crashed", healthy, guest)


def boot_checks(run, guest, mounts):
    run.check("the guest reboots", reboot, guest)
    run.check("the automount waits for the first access", automount_waits, guest)
    bytes_of_all(run, guest, mounts, "boot")
    run.check("an idle automount goes away, and comes back", automount_idles, guest)
    run.check("sources on another file system were mounted before", ordered, guest)


def kill_checks(run, guest, mounts):
    for target, model, unit in mounts:
        run.check(f"killed daemon: {target} comes back", killed, guest, target, model, unit)


def upgrade_checks(run, guest, mounts):
    run.check("upgrade under mapped files", upgrade, guest, mounts)
    bytes_of_all(run, guest, mounts, "upgrade")
    run.check("restart of the service under mapped files", restart_service, guest)
    run.check("the guest reboots after the upgrade", reboot, guest)
    bytes_of_all(run, guest, mounts, "upgrade and boot")


def power_checks(run, guest, mounts):
    run.check("the power is cut while files are read, and the guest boots", power_cut, guest, mounts)
    bytes_of_all(run, guest, mounts, "power cut")


def remove_checks(run, guest, mounts):
    run.check("remove takes every mount off and leaves the configuration", remove, guest, mounts)
    run.check("installed again, the service mounts by itself", reinstall, guest)
    run.check("purge leaves no file of the package, and keeps those of the administrator", purge, guest)
    run.check("the guest reboots without the package", reboot_without, guest)


# The values of `--sections`. A section can start in the state in which any other section leaves the machine. After the
# last one there are no mounts.
SECTIONS = {
    "boot": boot_checks,
    "kill": kill_checks,
    "upgrade": upgrade_checks,
    "power": power_checks,
    "remove": remove_checks,
}


def bytes_of_all(run, guest, mounts, when):
    for target, model, _ in mounts:
        run.check(f"bytes of {target} after {when}", guest.compare, target, model)


def install(guest):
    guest.run("DEBIAN_FRONTEND=noninteractive dpkg -i /root/debs/first.deb", 120)
    return guest.run("tensorfs --version; which mount.tensorfs | tr '\\n' ' '").replace("\n", ", ")


def unconfigured(guest):
    equal(guest.active("tensorfs.service") == "failed", False, "failed")
    equal(guest.run("systemctl is-enabled tensorfs.service"), "enabled", "is-enabled")
    guest.run("systemctl start tensorfs.service")
    equal(guest.active("tensorfs.service") == "failed", False, "failed after a start")
    equal(guest.run("systemctl --failed --no-legend --plain"), "", "failed units")


def doctor(guest):
    code, output = guest.machine.result("tensorfs doctor")
    equal(code, 0, f"exit status of doctor: {output}")
    notes = [line.strip() for line in output.splitlines() if not line.lstrip().startswith("ok")]
    return "\n         ".join(["", *notes])


def configure(guest):
    guest.put("/etc/fstab", FSTAB, append=True)
    guest.run("mkdir -p /mnt/fstab /mnt/auto /srv/instance /srv/models/llama /srv/models/step")
    options = "SOURCE=/data/checkpoints/llama\nTARGET=/srv/instance\nOPTIONS=ro,allow_other\n"
    guest.put("/etc/tensorfs/llama.conf", options)
    guest.put("/etc/tensorfs/config.toml", CONFIG)
    guest.run("systemctl daemon-reload")
    guest.run("systemctl enable --now tensorfs@llama.service", 60)
    guest.run("mount /mnt/fstab", 60)
    guest.run("systemctl start mnt-auto.automount", 60)
    guest.run("systemctl reload-or-restart tensorfs.service", 60)
    guest.wait("grep -q ' /srv/models/step fuse.tensorfs ' /proc/self/mounts", 30, "the service mounts")


def reboot(guest):
    seconds = guest.machine.reboot()
    equal(guest.run("systemctl --failed --no-legend --plain"), "", "failed units")
    bad = guest.run("journalctl -b -1 -q --no-pager -t systemd -t systemd-shutdown | grep -E 'Failed unmounting|Failed to unmount|timed out|SIGKILL'",
                    whatever=True)
    equal(bad, "", "the journal of the shutdown")
    return f"down in {seconds:.1f} s, {guest.run('systemd-analyze time | head -1', whatever=True)}"


def automount_waits(guest):
    equal(guest.active("mnt-auto.automount"), "active", "automount")
    equal(guest.mounted("/mnt/auto"), False, "mounted before an access")


def automount_idles(guest):
    guest.wait("! grep -q ' /mnt/auto fuse.tensorfs ' /proc/self/mounts", 90, "the automount goes away")
    guest.wait("! pgrep -f '[m]nt/auto'", 30, "its daemon ends")
    guest.compare("/mnt/auto", "step-9000")


def ordered(guest):
    equal(guest.property("data.mount", "Before").split().count("local-fs.target"), 0, "waits for data.mount")
    for unit in ("mnt-fstab.mount", "tensorfs@llama.service", "tensorfs.service"):
        if "data.mount" not in guest.property(unit, "After").split():
            raise AssertionError(f"{unit} is not ordered after data.mount")
        stamps = [
            int(guest.property(one, "ActiveEnterTimestampMonotonic")) for one in ("data.mount", unit)
        ]
        if not 0 < stamps[0] <= stamps[1]:
            raise AssertionError(f"{unit} was active at {stamps[1]}, data.mount at {stamps[0]}")


def killed(guest, target, model, unit):
    guest.compare(target, model)
    pid = guest.daemon(target)
    begin = time.monotonic()
    guest.run(f"kill -9 {pid}")
    note = ""
    if target == AUTOMOUNT[0]:
        # No process accesses the mount: systemd unmounts it when it is idle, and the next access mounts it again.
        guest.wait(f"! grep -q ' {target} fuse.tensorfs ' /proc/self/mounts", 60, "the idle mount goes away")
        note = ", after its idle time"
    try:
        seconds = 2 if unit.endswith(".mount") else 20
        guest.wait(f"test \"$(timeout 5 head -c 8 {target}/model.safetensors | wc -c)\" = 8", seconds, "a new open works")
    except AssertionError:
        if not unit.endswith(".mount"):
            raise
        # systemd does not restart the daemon of a mount unit, so the administrator has to start it again.
        note = f", after systemctl restart {unit}"
        begin = time.monotonic()
        guest.run(f"systemctl restart {unit}", 60)
    seconds = time.monotonic() - begin
    guest.compare(target, model)
    equal(guest.daemon(target) == pid, False, "the daemon is the killed one")
    return f"{seconds:.1f} s{note}"


def upgrade(guest, mounts):
    names = [(f"r{number}", *mount) for number, mount in enumerate(mounts)]
    for name, target, model, _ in names:
        guest.read(name, target, model)
    before = guest.run("dpkg-query -W -f '${Version}' tensorfs")
    output = guest.run("DEBIAN_FRONTEND=noninteractive dpkg -i /root/debs/next.deb", 120)
    after = guest.run("dpkg-query -W -f '${Version}' tensorfs")
    equal(before == after, False, "the version is the old one")
    for name, *_ in names:
        guest.goes_on(name)
    for _, _, unit in mounts:
        equal(guest.active(unit), "active", unit)
    # An automount is unmounted once no process reads it.
    notes = [f"{before} to {after}"] + [f"{target} {guest.end_reader(name)}" for name, target, _, _ in names]
    program = guest.run(f"readlink /proc/{guest.main_pid('tensorfs.service')}/exe")
    equal(program, "/usr/bin/tensorfs", f"the program of the service after the upgrade ({output})")
    return "\n         ".join(notes)


def restart_service(guest):
    names = [(f"s{number}", *mount) for number, mount in enumerate(SERVICE)]
    for name, target, model, _ in names:
        guest.read(name, target, model)
    pid = guest.main_pid("tensorfs.service")
    for _ in range(5):
        guest.run("systemctl restart tensorfs.service", 60)
        for name, *_ in names:
            guest.goes_on(name)
        guest.run("systemctl reset-failed tensorfs.service", whatever=True)
    equal(guest.main_pid("tensorfs.service") == pid, False, "the process is the old one")
    return "5 restarts; " + "; ".join(guest.end_reader(name) for name, *_ in names)


def power_cut(guest, mounts):
    for number, (target, model, _) in enumerate(mounts):
        guest.read(f"p{number}", target, model)
    guest.machine.cut_power()
    equal(guest.run("systemctl --failed --no-legend --plain"), "", "failed units")


def remove(guest, mounts):
    for target, model, _ in mounts:
        guest.compare(target, model)
    # The table of mounts escapes characters of this name.
    guest.run("mkdir -p '/srv/a b\\c' && tensorfs mount /data/checkpoints/step-9000 '/srv/a b\\c'")
    output = guest.run("DEBIAN_FRONTEND=noninteractive dpkg --remove tensorfs", 120)
    equal(guest.run("grep fuse.tensorfs /proc/self/mounts", whatever=True), "", f"mounts left: {output}")
    guest.wait("! pgrep -x '(mount.)?tensorfs'", 20, "every daemon ends")
    guest.run("test -e /etc/tensorfs/config.toml")
    guest.run("test ! -e /usr/bin/tensorfs")
    equal(guest.active("tensorfs.service"), "inactive", "tensorfs.service")


def reinstall(guest):
    guest.run("DEBIAN_FRONTEND=noninteractive dpkg -i /root/debs/next.deb", 120)
    for target, model, _ in SERVICE:
        guest.compare(target, model)


def purge(guest):
    # Unmounts while a file is in use: its reader goes on, and the mount is gone.
    guest.run("mount /mnt/fstab", 60)
    guest.read("last", "/mnt/fstab", "llama")
    output = guest.run("DEBIAN_FRONTEND=noninteractive dpkg --purge tensorfs", 120)
    equal(guest.run("grep fuse.tensorfs /proc/self/mounts", whatever=True), "", f"mounts left: {output}")
    note = guest.end_reader("last")
    guest.wait("! pgrep -x '(mount.)?tensorfs'", 20, "the daemon ends after its last reader")
    left = guest.run(
        "find / -xdev -name '*tensorfs*' -not -path '/root/*' -not -path '/proc/*' -not -path '/var/log/journal/*'"
    )
    equal(left, "/etc/tensorfs", "left behind")
    equal(guest.run("ls /etc/tensorfs"), "llama.conf", "left in /etc/tensorfs")
    return f"a reader went on: {note}"


def reboot_without(guest):
    guest.machine.reboot()
    guest.run("test ! -e /usr/bin/tensorfs")


def healthy(guest):
    found = guest.run(
        "journalctl -q --no-pager | grep -E 'blocked for more than|segfault|panicked|BUG:|Oops|core dump|Out of memory'",
        whatever=True,
    )
    equal(found, "", "in the journal of all boots")

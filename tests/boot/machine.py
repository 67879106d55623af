"""A Debian root with systemd, and the virtual machine that boots it."""

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "systemd-sysv,udev,dbus,kmod,procps,initramfs-tools,fuse3,python3,zstd"
KERNEL = "linux-image-cloud-amd64"
ROOT_SIZE = "2G"
DATA_SIZE = "512M"
# Factor by which all time limits are longer if the processor is emulated.
EMULATED = 8
# The feature `arch-capabilities` is off, because some hosts offer it but refuse to set it.
CPU = "max,arch-capabilities=off"
# Arguments of qemu for each accelerator. An emulated machine has one processor, which keeps one real processor busy,
# and more memory for translated code than by default. qemu 7.2 sometimes emulates cmpxchg16b wrongly, so that Linux
# 6.12 panics.
PROCESSOR = {"kvm": ["-accel", "kvm", "-cpu", CPU, "-smp", "2"],
             "tcg": ["-accel", "tcg,tb-size=512", "-cpu", CPU + ",cx16=off", "-smp", "1"]}
# Further arguments of the kernel. On a busy host the emulated timer is late, and without `no_timer_check` the kernel
# would report it as broken.
KERNEL_WORDS = {"kvm": "", "tcg": " mitigations=off no_timer_check"}
AGENT_UNIT = """[Unit]
Description=Commands of the host
[Service]
ExecStart=/usr/bin/python3 /opt/guest_agent.py
Restart=always
RestartSec=1s
KillMode=process
OOMScoreAdjust=-1000
[Install]
WantedBy=multi-user.target
"""


class Broken(Exception):
    """The machine does not work, or could not be made, so that further checks make no sense."""


def call(*words, timeout, **popen):
    """Runs a command on the host to its end. Raises `Broken` with its output if it fails."""
    words = [str(word) for word in words]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, **popen
        )
    except subprocess.TimeoutExpired:
        raise Broken(f"{' '.join(words)}: not done within {timeout} s") from None
    output = done.stdout.decode(errors="replace")
    if done.returncode:
        raise Broken(f"{' '.join(words)}: exit {done.returncode}\n{output[-3000:]}")
    return output


def make_base(archive, suite, kernel_suite):
    """Makes a Debian root of `suite` with the kernel of `kernel_suite`, as a tar file."""
    root = archive.with_suffix(".root")
    shutil.rmtree(root, ignore_errors=True)
    packages = PACKAGES + ("" if kernel_suite else f",{KERNEL}")
    call("debootstrap", "--variant=minbase", f"--include={packages}", suite, root, MIRROR, timeout=1200)
    if kernel_suite:
        (root / "etc/apt/sources.list").write_text(f"deb {MIRROR} {suite} main\ndeb {MIRROR} {kernel_suite} main\n")
        in_root(root, "apt-get", "update", "-qq", timeout=300)
        in_root(root, "apt-get", "install", "-qq", "-y", "--no-install-recommends", "-t", kernel_suite, KERNEL,
                timeout=900)
    in_root(root, "apt-get", "clean", timeout=60)
    for lists in (root / "var/lib/apt/lists").glob("*_*"):
        lists.unlink()
    (root / "etc/hostname").write_text("tensorfs-boot\n")
    (root / "etc/fstab").write_text("/dev/vda / ext4 defaults 0 1\n/dev/vdb /data ext4 ro,nofail 0 0\n")
    (root / "data").mkdir()
    (root / "etc/systemd/system/boot-agent.service").write_text(AGENT_UNIT)
    in_root(root, "systemctl", "enable", "boot-agent.service", timeout=60)
    journal = root / "var/log/journal"
    journal.mkdir(parents=True, exist_ok=True)
    call("tar", "-C", root, "--one-file-system", "--zstd", "-cf", archive, ".", timeout=600)
    shutil.rmtree(root)


def in_root(root, *words, timeout):
    """Runs a command in the root without systemd, as an image builder does."""
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    return call("chroot", root, *words, timeout=timeout, env=environment)


def make_disk(folder, image, size):
    call("mke2fs", "-q", "-t", "ext4", "-m", "0", "-d", folder, image, size, timeout=600)


def kvm_boots(work, kernel):
    """Whether the kernel boots with kvm. The kvm of some machines supports only special kernels: it emulates each
    instruction of other kernels, slower than qemu does, and lacks some instructions."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    console = work / "kvm.log"
    console.touch()
    words = [
        "qemu-system-x86_64", "-machine", "q35,accel=kvm", "-cpu", CPU, "-m", "512", "-display", "none", "-no-reboot",
        "-nic", "none", "-kernel", kernel, "-append", "console=ttyS0 earlyprintk=ttyS0 panic=-1",
        "-serial", f"file:{console}",
    ]
    qemu = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    try:
        while time.monotonic() < deadline:
            ended = qemu.poll() is not None
            if b"Linux version" in console.read_bytes():
                return True
            if ended:
                return False
            time.sleep(0.1)
        return False
    finally:
        qemu.kill()
        qemu.wait()


class Machine:
    """qemu with a root disk, a data disk and a port to the agent."""

    def __init__(self, work, kernel, initrd):
        self.work, self.kernel, self.initrd = work, kernel, initrd
        self.console = work / "console.log"
        self.port = work / "port"
        self.boots = 0
        self.qemu = self.link = None
        self.calls = 0
        self.accelerator = "kvm" if kvm_boots(work, kernel) else "tcg"
        self.slower = 1 if self.accelerator == "kvm" else EMULATED

    def start(self):
        """Boots the machine, and waits until the agent answers."""
        self.port.unlink(missing_ok=True)
        self.boots += 1
        words = [
            "qemu-system-x86_64", "-machine", "q35", *PROCESSOR[self.accelerator], "-m", "1024",
            "-display", "none", "-no-reboot", "-nic", "none", "-kernel", self.kernel, "-initrd", self.initrd,
            "-append", "root=/dev/vda rw console=ttyS0 systemd.journald.forward_to_console=0 panic=-1" + KERNEL_WORDS[self.accelerator],
            "-serial", f"file:{self.console}",
            "-drive", f"file={self.work}/root.img,if=virtio,format=raw,cache=unsafe",
            "-drive", f"file={self.work}/data.img,if=virtio,format=raw,cache=unsafe",
            "-device", "virtio-serial-pci", "-chardev", f"socket,id=port,path={self.port},server=on,wait=off",
            "-device", "virtserialport,chardev=port,name=tensorfs.boot",
        ]
        with open(self.work / "qemu.log", "ab") as log:
            self.qemu = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + 120 * self.slower
        self.link = socket.socket(socket.AF_UNIX)
        while True:
            try:
                self.link.connect(str(self.port))
                break
            except OSError:
                self.check_alive(deadline, "qemu has no port")
                time.sleep(0.05)
        self.waiting = b""
        self.run("systemctl is-system-running --wait", 60, whatever=True)

    def check_alive(self, deadline, what):
        if self.qemu.poll() is not None:
            raise Broken(f"qemu ended with status {self.qemu.returncode}: {self.tail()}")
        if time.monotonic() > deadline:
            raise Broken(f"{what}: {self.tail()}")

    def tail(self):
        log = (self.work / "qemu.log").read_text(errors="replace")[-1000:]
        console = self.console.read_text(errors="replace")[-3000:] if self.console.exists() else ""
        return f"\n{log}\n{console}"

    def run(self, command, timeout=60, whatever=False):
        """Runs a shell command in the guest, and returns its output, without spaces at its ends. The command must
        succeed, unless `whatever` is true."""
        code, output = self.result(command, timeout)
        if code != 0 and not whatever:
            what = f"not done within {timeout} s" if code is None else f"exit {code}"
            raise AssertionError(f"{command}: {what}\n{output[-3000:]}")
        return output.strip()

    def result(self, command, timeout=60):
        """Runs a shell command in the guest. Returns its exit status (None if it did not end in time) and its
        output."""
        self.calls += 1
        timeout *= self.slower
        request = {"id": self.calls, "command": command, "timeout": timeout}
        self.link.settimeout(10)
        self.link.sendall(json.dumps(request).encode() + b"\n")
        # The first answer comes only after the boot.
        deadline = time.monotonic() + timeout + 30 * self.slower
        self.link.settimeout(1)
        while True:
            while b"\n" in self.waiting:
                line, self.waiting = self.waiting.split(b"\n", 1)
                reply = json.loads(line)
                if reply["id"] == self.calls:
                    return reply["code"], reply["output"]
            try:
                data = self.link.recv(65536)
            except TimeoutError:
                data = b""
            except OSError:
                self.check_alive(0, "the port is closed")
            self.waiting += data
            if not data:
                self.check_alive(deadline, f"the guest does not answer to: {command}")

    def wait(self, command, seconds, what):
        """Runs `command` in the guest until it succeeds."""
        deadline = time.monotonic() + seconds * self.slower
        while True:
            code, output = self.result(command, 30)
            if code == 0:
                return output.strip()
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds} s: {what}\n{command}: exit {code}\n{output[-2000:]}")
            time.sleep(0.2)

    def reboot(self):
        """Shuts the guest down properly, and boots it again. Returns the seconds that the shutdown took."""
        begin = time.monotonic()
        self.run("systemctl --no-block reboot")
        self.wait_end(150)
        seconds = time.monotonic() - begin
        self.start()
        return seconds

    def wait_end(self, seconds):
        try:
            self.qemu.wait(seconds * self.slower)
        except subprocess.TimeoutExpired:
            raise Broken(f"the guest did not end within {seconds * self.slower} s: {self.tail()}") from None
        finally:
            self.link.close()

    def cut_power(self):
        self.end()
        self.start()

    def end(self):
        """Kills the machine."""
        if self.link:
            self.link.close()
        if self.qemu and self.qemu.poll() is None:
            self.qemu.kill()
            self.qemu.wait()

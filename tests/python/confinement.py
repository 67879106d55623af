"""Runs programs with the confinement of the shipped units: with their capabilities and their filters of system calls.

`Mount(source, preexec_fn=confined_by("tensorfs@.service"))`. The tests read the unit file itself. System calls are
filtered if systemd-analyze and libseccomp2 are installed. Capabilities are always limited.
"""

import contextlib
import ctypes
import errno
import functools
import os
import shutil
import socket
import struct
import subprocess
import tempfile

from mounts import ROOT, is_root

# These are numbers from linux/prctl.h.
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 22, 24, 38
MODE_FILTER = 2

# The numbers of all capabilities that the shipped units may name, from linux/capability.h.
CAPABILITIES = {
    "CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_DAC_READ_SEARCH": 2, "CAP_FOWNER": 3, "CAP_KILL": 5, "CAP_SETGID": 6,
    "CAP_SETUID": 7, "CAP_IPC_LOCK": 14, "CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_SYS_NICE": 23,
    "CAP_SYS_RESOURCE": 24, "CAP_LEASE": 28,
}

# Flags of clone(2) that make namespaces.
NAMESPACES = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)

# These are numbers from seccomp.h and linux/seccomp.h.
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
EQUAL, GREATER, MASKED_EQUAL = 4, 6, 7

PROT_WRITE, PROT_EXEC, SHM_EXEC = 2, 4, 0o100000


def load_filter(program):
    """Filters the system calls of this process and its children by a BPF program."""
    code = ctypes.create_string_buffer(program, len(program))
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, MODE_FILTER, filters, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


@functools.cache
def confined_by(name):
    """For `preexec_fn`: limits a process of root as the unit `name` limits its service."""
    return Unit(name).confine


def without_capability(name):
    """For `preexec_fn`: the started program has all capabilities of this process except `name`."""
    return functools.partial(_drop, {CAPABILITIES[name]})


def _drop(numbers):
    libc = ctypes.CDLL(None)
    for number in numbers:
        libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)


def filters_work():
    """Whether system calls can be filtered on this machine."""
    return bool(shutil.which("systemd-analyze")) and _libseccomp() is not None


class Unit:
    """The settings of a shipped unit."""

    def __init__(self, name):
        self.settings = {}
        for line in (ROOT / "systemd" / name).read_text().partition("[Service]")[2].splitlines():
            key, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                self.settings.setdefault(key, []).append(value)
        self.capabilities = self.words("CapabilityBoundingSet")
        self.programs = list(self._programs()) if is_root and filters_work() else []

    def words(self, key):
        return [word for value in self.settings.get(key, []) for word in value.split()]

    def has(self, key):
        return self.words(key) == ["yes"]

    def confine(self):
        libc = ctypes.CDLL(None, use_errno=True)
        _drop(set(range(64)) - {CAPABILITIES[name] for name in self.capabilities})
        for mask in self.words("UMask"):
            os.umask(int(mask, 8))
        if self.has("NoNewPrivileges"):
            libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        for program in self.programs:
            load_filter(program)

    def _programs(self):
        """The filters that systemd makes of the settings, as programs for the kernel."""
        if "SystemCallFilter" in self.settings:
            number = getattr(errno, *self.words("SystemCallErrorNumber"))
            with _Rules(ERRNO | number) as rules:
                for call in _calls_of(["@default", *self.words("SystemCallFilter")]):
                    rules.add(ALLOW, call)
                yield rules.program()
        with _Rules(ALLOW) as rules:
            if families := self.words("RestrictAddressFamilies"):
                allowed = {int(getattr(socket, family)) for family in families}
                for family in set(range(max(allowed))) - allowed:
                    rules.add(ERRNO | errno.EAFNOSUPPORT, "socket", (0, EQUAL, family))
                rules.add(ERRNO | errno.EAFNOSUPPORT, "socket", (0, GREATER, max(allowed)))
            if self.has("RestrictNamespaces"):
                for flag in NAMESPACES:
                    rules.add(ERRNO | errno.EPERM, "unshare", (0, MASKED_EQUAL, flag, flag))
                    rules.add(ERRNO | errno.EPERM, "clone", (0, MASKED_EQUAL, flag, flag))
                rules.add(ERRNO | errno.EPERM, "setns")
                rules.add(ERRNO | errno.ENOSYS, "clone3")
            if self.has("MemoryDenyWriteExecute"):
                both = PROT_WRITE | PROT_EXEC
                rules.add(ERRNO | errno.EPERM, "mmap", (2, MASKED_EQUAL, both, both))
                rules.add(ERRNO | errno.EPERM, "mprotect", (2, MASKED_EQUAL, PROT_EXEC, PROT_EXEC))
                rules.add(ERRNO | errno.EPERM, "pkey_mprotect", (2, MASKED_EQUAL, PROT_EXEC, PROT_EXEC))
                rules.add(ERRNO | errno.EPERM, "shmat", (2, MASKED_EQUAL, SHM_EXEC, SHM_EXEC))
            yield rules.program()


class _Comparison(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


class _Rules:
    """Rules for system calls, which libseccomp compiles."""

    def __init__(self, default):
        self._default = default

    def __enter__(self):
        self._lib = _libseccomp()
        self._lib.seccomp_init.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._lib.seccomp_init(ctypes.c_uint32(self._default)))
        return self

    def __exit__(self, *_):
        self._lib.seccomp_release(self._context)

    def add(self, action, call, *comparisons):
        number = self._lib.seccomp_syscall_resolve_name(call.encode())
        # A negative number means a call of other architectures, or one that this version of the library does not know.
        if number >= 0:
            compared = (_Comparison * len(comparisons))(*comparisons)
            done = self._lib.seccomp_rule_add_array(
                self._context, ctypes.c_uint32(action), number, len(comparisons), compared
            )
            assert done == 0, (call, os.strerror(-done))

    def program(self):
        with tempfile.TemporaryFile() as file:
            assert self._lib.seccomp_export_bpf(self._context, file.fileno()) == 0
            file.seek(0)
            return file.read()


@functools.cache
def _libseccomp():
    with contextlib.suppress(OSError):
        return ctypes.CDLL("libseccomp.so.2")
    return None


@functools.cache
def _groups():
    """Groups of system calls, as systemd lists them: name -> names of calls and groups."""
    groups, members = {}, []
    words = ["systemd-analyze", "--no-pager", "syscall-filter"]
    for line in subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines():
        if line.startswith("@"):
            members = groups.setdefault(line.strip(), [])
        elif line.startswith(" ") and not line.lstrip().startswith("#"):
            members.append(line.strip())
    return groups


def _calls_of(words):
    """The calls that a list of calls and groups names."""
    calls, left = set(), list(words)
    while left:
        word = left.pop()
        if word.startswith("@"):
            left += _groups()[word]
        else:
            calls.add(word)
    return sorted(calls)

"""Programs that know nothing of weights."""

import hashlib
import json
import shutil
import subprocess
import unittest
from pathlib import Path

from mounts import wait_until
from rows import Row, first_line, tensorfs

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")

NGINX_CONFIG = """
daemon off; master_process off; pid {tmp}/nginx.pid; error_log {tmp}/error.log;
events {{}}
http {{ access_log off; client_body_temp_path {tmp}; sendfile {sendfile}; {aio}
    server {{ listen unix:{tmp}/socket; root {mnt}; }} }}
"""


def needs_program(name):
    return unittest.skipIf(shutil.which(name) is None, f"not installed: {name}")


class Programs(Row):
    """The real file is that of `consolidate`, so that files are equal byte by byte."""

    def setUp(self):
        super().setUp()
        self.copy = self.tmp / "consolidated"
        self.assert_done(tensorfs("consolidate", self.shards, self.copy))
        self.file, self.same = self.mnt / "model.safetensors", self.copy / "model.safetensors"

    def assert_same_files(self, one, other):
        self.assertEqual(Path(one).read_bytes(), Path(other).read_bytes())

    @needs_program("sha256sum")
    def test_sha256sum(self):
        self.used("sha256sum", first_line("sha256sum", "--version"))
        found = self.output("sha256sum", self.file).split()[0]
        self.assertEqual(found, hashlib.sha256(self.same.read_bytes()).hexdigest())

    def test_cp_dd_and_tar(self):
        self.used("cp, dd, tar", f"{first_line('cp', '--version')}; {first_line('tar', '--version')}")
        out = self.tmp / "out"
        self.output("cp", "-a", self.mnt, out)
        self.assert_same_files(out / "model.safetensors", self.same)
        for words in (("bs=64K",), ("bs=4M", "iflag=direct"), ("bs=12345",)):
            self.output("dd", f"if={self.file}", f"of={self.tmp}/dd", *words)
            self.assert_same_files(self.tmp / "dd", self.same)
        self.output("tar", "-C", self.mnt, "-cf", self.tmp / "all.tar", ".")
        (self.tmp / "untarred").mkdir()
        self.output("tar", "-C", self.tmp / "untarred", "-xf", self.tmp / "all.tar")
        self.assert_same_files(self.tmp / "untarred/model.safetensors", self.same)

    @needs_program("rsync")
    def test_rsync(self):
        self.used("rsync", first_line("rsync", "--version"))
        out = self.tmp / "out"
        self.output("rsync", "-a", "--checksum", f"{self.mnt}/", out)
        self.assert_same_files(out / "model.safetensors", self.same)
        # Nothing differs: sizes and times are those of the mount.
        self.assertEqual(self.output("rsync", "-ai", f"{self.mnt}/", out).strip(), "")

    @needs_program("fio")
    def test_fio(self):
        self.used("fio", first_line("fio", "--version"))
        for engine, direct in (("psync", 0), ("mmap", 0), ("libaio", 1), ("io_uring", 0)):
            with self.subTest(engine):
                words = ("--name=r", f"--filename={self.file}", "--rw=randread", "--bs=4k", "--readonly", "--norandommap=0")
                said = self.output(
                    "fio", *words, f"--ioengine={engine}", f"--direct={direct}", "--iodepth=8", "--output-format=json", "--allow_file_create=0"
                )
                job = json.loads(said[said.index("{") :])["jobs"][0]
                self.assertEqual(job["error"], 0)
                self.assertGreaterEqual(job["read"]["io_bytes"], self.same.stat().st_size // 4096 * 4096)

    @unittest.skipIf(NGINX is None, "not installed: nginx")
    def test_nginx(self):
        self.used("nginx", first_line(NGINX, "-v"))
        right = self.same.read_bytes()
        for sendfile, aio in (("on", ""), ("off", ""), ("off", "aio threads;")):
            with self.subTest(sendfile=sendfile, aio=aio):
                config = self.tmp / "nginx.conf"
                config.write_text(NGINX_CONFIG.format(tmp=self.tmp, mnt=self.mnt, sendfile=sendfile, aio=aio))
                socket = self.tmp / "socket"
                socket.unlink(missing_ok=True)
                server = subprocess.Popen([NGINX, "-c", config, "-e", self.tmp / "error.log"])
                try:
                    wait_until(socket.exists, 20, "nginx listens")
                    get = ("curl", "-sf", "--unix-socket", socket, "http://x/model.safetensors")
                    self.output(*get, "-o", self.tmp / "whole")
                    self.assertEqual((self.tmp / "whole").read_bytes(), right)
                    self.output(*get, "-r", "5-70000", "-o", self.tmp / "range")
                    self.assertEqual((self.tmp / "range").read_bytes(), right[5:70001])
                finally:
                    server.terminate()
                    server.wait(20)

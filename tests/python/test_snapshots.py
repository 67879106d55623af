"""Texts that people and programs read, word for word: help, status, metrics, doctor and the messages of refusals.

    TENSORFS_WRITE_SNAPSHOTS=1 target/test-venv/bin/python tests/python -k test_snapshots.

writes `tests/fixtures/snapshots` anew. The diff of these files shows what a change means for users.
"""

import os
import re

from checkpoints import hf_set
from manifest import BAD
from mounts import FIXTURES, INDEX_DIR, Mount, needs_root, tensorfs
from services import ServiceCase, mount_config
from test_metrics import UnixConnection

FOLDER = FIXTURES / "snapshots"
WRITE = os.environ.get("TENSORFS_WRITE_SNAPSHOTS")
NUMBER = re.compile(r"(?<![\w.])\d[\d.]*(?: ?(?:[KMG]iB|MB|GB|ms|us|s|%))?(?![\w.])")


class Snapshots(ServiceCase):
    maxDiff = None

    def compare(self, name, text):
        path = FOLDER / name
        text = "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"
        if WRITE:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text)
        self.assertEqual(text, path.read_text(), f"{path} differs: see the top of {__file__}")

    def test_help_of_every_command(self):
        whole = tensorfs("--help").stdout
        commands = re.findall(r"^  ([a-z]+)  +\S", whole.partition("Commands:")[2].partition("Options:")[0], re.M)
        self.assertIn("mount", commands)
        pages = [f"$ tensorfs {name} --help\n{tensorfs(name, '--help').stdout}" for name in commands if name != "help"]
        self.compare("help.txt", "\n".join([f"$ tensorfs --help\n{whole}", *pages]))

    def test_messages_of_every_refused_fixture(self):
        lines = []
        for entry in BAD:
            source = entry.build(self.tmp / entry.id.replace("/", "_"))
            outcome = tensorfs("ls", source)
            said = outcome.stderr.replace(str(source), "SOURCE").replace(str(self.tmp), "TMP")
            lines += [f"{entry.id}: exit {outcome.code}", *(f"    {line}" for line in said.splitlines())]
        self.compare("refusals.txt", "\n".join(lines))

    def test_messages_about_wrong_arguments(self):
        source = hf_set(self.tmp / "source")
        target = self.tmp / "target"
        target.mkdir()
        lines = []
        for words in (
            ["mount"],
            ["mount", source],
            ["mount", self.tmp / "gone", self.tmp],
            ["mount", source, self.tmp / "gone"],
            ["mount", source, self.tmp / "source/config.json"],
            ["mount", source, target, "-o", "cach=1G"],
            ["mount", source, target, "-o", "cache=much"],
            ["mount", source, target, "-o", "watch=maybe"],
            ["mount", source, target, "-o", "tp=2"],
            ["mount", source, target, "-o", "tp=2,rank=2"],
            ["mount", source, target, "-o", "dtype=f17"],
            ["mount", source, target, "-o", "verify=never"],
            ["mount", source, target, "-o", "io-timeout=0"],
            ["umount", self.tmp],
            ["umount", self.tmp / "gone"],
            ["status", self.tmp],
            ["ls", self.tmp / "gone"],
            ["ls", source, "-o", "layout=none"],
            ["cat", source, "gone.weight"],
            ["load", source, "--device", "gpu"],
            ["load", source, "--include", "nothing.*"],
            ["consolidate", source, source],
            ["consolidate", source],
            ["convert", source, self.tmp / "out.zip"],
            ["diff", source],
            ["diff", source, self.tmp / "gone"],
            ["index", self.tmp / "gone"],
            ["heat", self.tmp],
            ["warm", self.tmp / "gone"],
            ["report", self.tmp / "gone"],
            ["serve", "--config", self.tmp / "gone.toml"],
            ["completions", "csh"],
            ["bench", self.tmp / "gone"],
            ["verfy", source],
            ["run", source],
        ):
            outcome = tensorfs(*words)
            shown = " ".join(map(str, words)).replace(str(self.tmp), "TMP")
            lines += [f"$ tensorfs {shown}", *outcome.stderr.replace(str(self.tmp), "TMP").splitlines()]
            lines += [f"exit {outcome.code}", ""]
        self.compare("arguments.txt", "\n".join(lines))

    def test_names_of_the_checks_of_doctor(self):
        outcome = tensorfs("doctor")
        names = [line[10:].split("  ")[0] for line in outcome.stdout.splitlines() if re.match(r"[a-z]", line)]
        self.compare("doctor.txt", "\n".join(names))

    def test_status_of_a_mount(self):
        with Mount(hf_set(self.tmp / "source"), "cache=64M") as m:
            (m.path / "model.safetensors").read_bytes()
            text = tensorfs("status", m.path).stdout
            for path, word in [(m.path, "TARGET"), (self.tmp, "TMP"), (INDEX_DIR, "INDEX")]:
                text = text.replace(str(path), word)
            # Limits of the kernel differ from machine to machine.
            text = re.sub(r"(?m)^(  kernel +\w+:).*", r"\1", text)
            self.compare("status.txt", NUMBER.sub("N", text))
            self.compare("status.json.txt", "\n".join(shape(tensorfs("status", "--json", m.path).json())))

    @needs_root
    def test_page_of_metrics(self):
        path, target = self.tmp / "metrics.sock", self.target("a")
        mount = mount_config("a", hf_set(self.tmp / "source"), target)
        self.serve(f'[service]\nmetrics = "unix:{path}"\n{mount}').wait_until_ready()
        (target / "model.safetensors").read_bytes()
        connection = UnixConnection(path)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        names = [line if line.startswith("#") else re.sub(r"\s\S+$", "", line) for line in lines]
        self.compare("metrics.txt", "\n".join(names).replace(str(self.tmp), "TMP"))


def shape(value, path=""):
    """The keys of a JSON document with the types of their values."""
    if isinstance(value, dict):
        return [line for key in sorted(value) for line in shape(value[key], f"{path}.{key}")]
    if isinstance(value, list):
        return sorted({line for one in value for line in shape(one, f"{path}[]")}) or [f"{path}[]"]
    return [f"{path}: {type(value).__name__}"]

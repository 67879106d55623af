"""The pages that users read: every command shown in them works as it stands, and every link and path leads somewhere."""

import errno
import importlib.util
import os
import re
import shutil
import sys
import unittest
from pathlib import Path

from checkpoints import hf_set, hub_cache, row_wise
from hub_server import TOKEN, HubServer
from mounts import BIN, ROOT, TestCase, detach, mount_table, run
from object_server import ACCESS_KEY, SECRET_KEY, ObjectServer

PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]

# Pages with tables of messages.
ERROR_PAGES = [ROOT / "docs/reference/errors.md", ROOT / "docs/operate/troubleshooting.md"]

# Folders of the pages that lie in the temporary folder of a test instead.
MOVED = re.compile(r"(?<![\w.~/-])/(data|mnt|scratch|tmp|var)(?=[/\s]|$)")

# Beginnings of lines that no test can run, each with the reason. A command that is not listed has to work.
NOT_RUN = {
    "cargo ": "builds what is built already, or takes tools that not everybody has",
    "kubectl ": "takes a cluster",
    "kubernetes-validate ": "takes a package that the tests do not need",
    "lintian ": "checks a package that no test builds",
    "mount/packaging/deb/build ": "takes cargo-deb",
    "git ": "changes this repository",
    "pip install ": "takes packages of the network",
    "python/wheel": "builds a release",
    "python tests/bench/": "measures, and takes other programs",
    "TENSORFS_BIN=target/dist/tensorfs python tests/bench/": "measures, and takes other programs",
    "python python/tests -k compat": "takes torch and the other loaders",
    "python python/tests/safetensors_suite.py ": "takes the source of safetensors",
    "python python/tests/consolidation_suite.py ": "takes the tests of torch or NeMo",
    "python python/tests/tensorizer_suite.py ": "takes torch, and the tests of tensorizer",
    "python tests/consumers": "takes other programs",
    "python tests/servers": "takes servers of others",
    "python tests/mutations": "takes torch",
    "sglang ": "takes SGLang and a GPU",
    "sudo ": "changes this machine",
    "tensorfs load /data/models/llama --device cuda:0": "takes a GPU",
    "tests/changed": "runs tests, maybe this one",
    "tests/run": "is what runs this test",
    "tests/engines/run": "takes vLLM and SGLang",
    "TENSORRT_LLM_SOURCES=": "takes a checkout of TensorRT-LLM",
    "tests/gpu/run": "takes a GPU",
    "vllm ": "takes vLLM and a GPU",
}

# A file of credentials with the profiles of the pages about remote sources.
KEYS = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
PROFILES = f"[default]\n{KEYS}[work]\n{KEYS}"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

# Made small: a page shows what a user wants, a test only has to see that it works.
SMALLER = {
    "cargo run --release --bin tensorfs -- ": "tensorfs ",
    "cargo run --example list_tensors -- ": f"{BIN.parent}/examples/list_tensors ",
    "tensorfs bench ": "tensorfs bench --runs 1 --evict fadvise ",
    "--size 4G": "--size 4M",
}


class Pages(TestCase):
    def test_every_command_of_the_readme_works(self):
        self.run_blocks(ROOT / "README.md")

    def test_every_command_of_the_other_pages_works(self):
        for page in PAGES[1:]:
            self.run_blocks(page)

    def test_a_command_that_is_wrong_is_noticed(self):
        for line in ("tensorfs mount run7 /mnt/run7 -o nonsense", "tensorfs verify gone", "tensorfs status /mnt/run7"):
            with self.subTest(line), self.assertRaises(AssertionError):
                self.run_line(self.sandbox(), line)

    def run_blocks(self, page):
        for block in re.findall(r"(?m)^```sh\n(.*?)^```", page.read_text(), re.DOTALL):
            folder = self.sandbox()
            for line in block.replace("\\\n", " ").splitlines():
                with self.subTest(page.name, line=line):
                    self.run_line(folder, line)
            unmount_below(folder)
            shutil.rmtree(folder)

    def run_line(self, folder, line):
        # Before the paths of this build come in, which may lie in one of these folders.
        moved = MOVED.sub(rf"{folder}/\1", line)
        for shown, small in SMALLER.items():
            line, moved = line.replace(shown, small), moved.replace(shown, small)
        line = line.strip()
        if not line or line.startswith(("#", *NOT_RUN)) or cannot_run(line):
            return
        env = {
            **os.environ,
            "HOME": str(folder / "home"),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "TENSORFS_PYTHON": sys.executable,
        }
        outcome = run("bash", "-o", "pipefail", "-c", moved, cwd=folder, env=env, timeout=100)
        refused = re.search(r"tests/fixtures/bad/", line) is not None
        self.assertEqual(outcome.code, int(refused), f"{moved}\nstdout: {outcome.stdout}\nstderr: {outcome.stderr}")

    def sandbox(self):
        """A folder with the checkpoints and folders that the pages name, and the programs of this build."""
        folder = self.tmp / f"sandbox-{len(list(self.tmp.iterdir()))}"
        for name in ("bin", "data/blobs", "mnt/run7", "mnt/models", "mnt/hub", "mnt/name", "mnt/llama", "scratch", "tmp"):
            (folder / name).mkdir(parents=True)
        for name in ("home", "target/release", "var/cache"):
            (folder / name).mkdir(parents=True)
        (folder / "tests").symlink_to(ROOT / "tests")
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "target/release/tensorfs").symlink_to(BIN)
        (folder / "bin/tensorfs").symlink_to(BIN)
        # Not a link: a virtual environment is found by the place of its interpreter.
        python = folder / "bin/python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        llama = hf_set(folder / "data/models/llama", megabytes=1)
        shutil.copy(llama / "model-00001-of-00003.safetensors", folder / "data/models/one.safetensors")
        row_wise(folder / "run7")
        (folder / "SRC").symlink_to(folder / "run7")
        self.write_manifest(folder / "run7", folder / "FILE")
        snapshot = hub_cache(folder / "home/.cache/huggingface/hub/models--ORG--NAME", llama)
        snapshot.with_name("REVISION").symlink_to(snapshot.name)
        return folder

    def write_manifest(self, checkpoint, file):
        self.assert_done(run(BIN, "verify", checkpoint, "--write-manifest"))
        (checkpoint / "model.tensorfs-manifest.json").rename(file)


class RemotePages(TestCase):
    """The commands of the pages about remote sources, on servers of the tests."""

    HOSTS = ("https://weights.example.com", "https://minio.example.com")

    def setUp(self):
        super().setUp()
        llama = hf_set(self.tmp / "llama", megabytes=1)
        self.store, self.hub = ObjectServer().start(), HubServer().start()
        self.addCleanup(self.store.stop)
        self.addCleanup(self.hub.stop)
        self.store.put_folder("models", "llama", llama)
        for name, revision in (("models/Qwen/Qwen3-8B", "main"), ("models/Qwen/Qwen3-8B", "refs/pr/7"), ("models/org/private", "main")):
            self.hub.commit(name, llama, revision)
        weights = {f"weights/{path.name}": path.read_bytes() for path in llama.iterdir()}
        self.hub.commit("datasets/ORG/NAME", None, "v1", weights)
        self.hub.repositories["models/org/private"].access = "private"
        self.files = {"etc/tensorfs/minio": PROFILES, "home/.aws/credentials": PROFILES, "run/secrets/hf": TOKEN}
        for name, text in self.files.items():
            (self.tmp / name).parent.mkdir(parents=True)
            (self.tmp / name).write_text(text)
        self.env = {**os.environ, **self.store.environment(), **self.hub.environment(), "HOME": str(self.tmp / "home")}
        self.env |= {"TENSORFS_CACHE_DIR": str(self.tmp / "cache"), "PATH": f"{BIN.parent}:{os.environ['PATH']}"}

    def test_every_command_about_remote_sources_works(self):
        for page in (ROOT / f"docs/guides/{name}.md" for name in ("object-stores", "disk-cache", "hub")):
            for block in re.findall(r"(?m)^```text\n(.*?)^```", page.read_text(), re.DOTALL):
                for line in block.splitlines():
                    # The helper of mount(8) has tests of its own, and the others need a GPU or are no commands.
                    if line.startswith("tensorfs "):
                        with self.subTest(page.name, line=line):
                            self.run_line(line.replace("--device cuda:0", ""))

    def run_line(self, line):
        place = self.tmp / "mnt"
        place.mkdir(exist_ok=True)
        moved = re.sub(r"/mnt/\w+", str(place), line).replace("/nvme/tensorfs", str(self.tmp / "nvme"))
        moved = moved.replace("/etc/ssl/ours.pem", str(CERTIFICATES))
        # Without a size it depends on the free space of the machine.
        moved = moved.replace("cache warm", "cache warm -o cache-dir-size=1G")
        for name in self.files:
            moved = moved.replace(f"/{name}", str(self.tmp / name))
        for host in self.HOSTS:
            moved = moved.replace(f"{host}/", f"{self.store.url}/models/").replace(host, self.store.url)
        # The server of an HTTP folder lets everybody in.
        self.store.public = {"models"} if self.HOSTS[0] in line else set()
        outcome = run("bash", "-c", moved, cwd=self.tmp, env=self.env, timeout=100)
        (self.tmp / "llama.safetensors").unlink(missing_ok=True)
        unmount_below(self.tmp)
        self.assert_done(outcome)


class Text(unittest.TestCase):
    def test_the_readme_is_short(self):
        self.assertLessEqual(len((ROOT / "README.md").read_text().splitlines()), 200)

    def test_the_index_links_to_every_page_and_the_readme_to_every_shelf(self):
        index = ROOT / "docs/README.md"
        links = set(re.findall(r"\]\(\./([\w-]+/[\w-]+\.md)\)", index.read_text()))
        shelves = {page.relative_to(index.parent).as_posix() for page in ROOT.glob("docs/*/*.md")}
        self.assertEqual(links, shelves)
        self.assertEqual([*ROOT.glob("docs/*.md")], [index])
        links = set(re.findall(r"\]\(\./docs/README\.md#([\w-]+)\)", (ROOT / "README.md").read_text()))
        self.assertEqual(links, {page.partition("/")[0] for page in shelves})

    def test_every_link_leads_to_a_page_and_a_heading_of_it(self):
        for page in PAGES:
            for path, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
                target = (page.parent / path).resolve() if path else page
                with self.subTest(page.name, link=f"{path}#{heading}"):
                    self.assertTrue(target.exists())
                    self.assertTrue(not heading or heading in headings(target))

    def test_every_path_of_the_pages_about_the_code_is_there(self):
        for page in PAGES[1:3]:
            for path in code_paths(page.read_text()):
                with self.subTest(page.name, path=path):
                    self.assertTrue((ROOT / path).exists())

    def test_every_message_of_the_pages_about_errors_is_one_of_the_program_or_the_system(self):
        sources = [path for folder in ("src", "mount/src") for path in (ROOT / folder).rglob("*.rs")]
        program = "\n".join(path.read_text() for path in sources)
        # Strings that go on in the next line.
        program = re.sub(r"\\\n\s*", "", program).replace('\\"', '"')
        system = {os.strerror(number) for number in errno.errorcode}
        for page in ERROR_PAGES:
            messages = shown_messages(page.read_text())
            self.assertGreater(len(messages), 20)
            for message in messages:
                # They are made of words of a table; the next test compares them as they are.
                for part in [] if message.startswith("option `") else fixed_parts(message):
                    with self.subTest(page.name, message=message, part=part):
                        self.assertTrue(part in program or part in system or is_counted(part, program))

    def test_messages_about_values_of_options_are_those_of_the_program(self):
        found = [re.fullmatch("option `(.*)`: (.*)", message) for message in shown_messages(ERROR_PAGES[0].read_text())]
        found = [match.groups() for match in found if match]
        self.assertGreater(len(found), 5)
        for option, message in found:
            with self.subTest(option=option):
                outcome = run(BIN, "mount", "/nonexistent", "/nonexistent", "-o", option.replace("...", "nonsense"))
                self.assertEqual(outcome.code, 2)
                self.assertIn(f"`: {message}\n", outcome.stderr)

    def test_a_message_that_no_program_has_is_noticed(self):
        self.assertEqual(fixed_parts("SHARD: tensor NAME: bytes 3..7 of it"), ["tensor", "bytes", "of it"])
        self.assertEqual(fixed_parts("a file `FILE`; it is (not) the TENSORFS-ERROR.txt"), ["a file", "it is", "not", "the TENSORFS-ERROR.txt"])
        program = 'let mounts = counted(n, "mount"); error!("{mounts} not kept: {e}")'
        self.assertTrue(is_counted("mounts not kept", program))
        self.assertFalse(is_counted("mounts not held", program))
        self.assertFalse(is_counted("shards not kept", program))
        text = "| message | x |\n|---|---|\n| ``a `b` c``, or `d` in e | `f` |\n\n| class | x |\n|---|---|\n| `g` | |\n"
        self.assertEqual(shown_messages(text), ["a `b` c", "d"])

    def test_the_chart_is_made_of_the_figures_beside_it(self):
        figures = ROOT / "docs/img/speed.json"
        made = run(sys.executable, ROOT / "tests/bench/chart.py", figures)
        self.assertEqual(made.stdout, figures.with_suffix(".svg").read_text())

    def test_every_python_example_is_python(self):
        for page in PAGES:
            for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
                with self.subTest(page.name):
                    compile(block, page.name, "exec")


def cannot_run(line):
    """Whether this machine lacks a program or package that the line takes."""
    if line.startswith(str(BIN.parent)):
        return not Path(line.split()[0]).exists()
    if line.startswith("python examples/"):
        if "torchtitan_llama_rules.py" in line:
            return False
        needed = ["torch", "transformers", *(["torchtitan"] if "torchtitan" in line else [])]
        return not all(importlib.util.find_spec(name) for name in needed)
    return "| jq " in line and shutil.which("jq") is None


def unmount_below(folder):
    for entry in reversed(mount_table()):
        if entry.path.startswith(f"{folder}/"):
            run(BIN, "umount", entry.path)
            detach(entry.path)


def headings(page):
    """The anchors of the headings of a page, as GitHub makes them."""
    lines = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?s)^```.*?^```", "", page.read_text(), flags=re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def shown_messages(text):
    """The messages in the first columns of the tables whose first column is about messages."""
    found, is_message = [], False
    for line in text.splitlines():
        if not line.startswith("|"):
            is_message = False
        elif line.startswith("| message"):
            is_message = True
        elif is_message and not line.startswith("|---"):
            first = line.removeprefix("| ").partition(" | ")[0]
            found += [a or b for a, b in re.findall(r"``(.+?)``|`(.+?)`", first)]
    return [message.strip() for message in found]


def fixed_parts(message):
    """The parts of a message between marks, and between words in capitals, numbers and dots, which stand for others."""
    parts = re.split(r"[:;,`()]|\.\.+|\b[A-Z]+\b(?![-_.])|\b\d+[KMGT]?\b", message)
    return [part for part in (part.strip(" =") for part in parts) if len(part) > 2]


def is_counted(part, program):
    """Whether `part`, after a number, is a thing that the program counts ("mounts" is "mount" in it) and words of it."""
    things, _, rest = part.partition(" ")
    return things.endswith("s") and f', "{things[:-1]}")' in program and rest in program


def code_paths(text):
    """Words in backticks that look like paths of this repository."""
    words = re.findall(r"`([\w./@-]+)`", re.sub(r"(?s)```.*?```", "", text))
    top = {entry.name for entry in ROOT.iterdir()}
    return {word for word in words if "/" in word and word.split("/")[0] in top and not word.startswith("target/")}


if __name__ == "__main__":
    unittest.main()

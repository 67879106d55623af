"""Changes checkpoints that hold pickles at random, and compares what tensorfs reads of each with what torch reads.

Run: `python tests/mutations [--count 3000] [--seed 1] [--keep FOLDER]` (needs torch; TENSORFS_BIN names a release build).

- If both read a checkpoint, all tensors are the same, bit by bit.
- If tensorfs reads a checkpoint that torch refuses, the reason is in `UNDERSTOOD`.
- No command crashes, and no command takes more than 64 MB of memory or more than a second.

The checkpoints are those in `tests/fixtures/torch`. The program prints each finding, and the counts at the end.
`--first 117 --count 1` makes change number 117 again.
"""

import argparse
import collections
import hashlib
import json
import os
import random
import re
import select
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import mutate

warnings.simplefilter("ignore")  # zipfile warns of names that are twice in an archive.
ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/fixtures/torch"
BIN = Path(os.environ.get("TENSORFS_BIN", ROOT / "target/release/tensorfs")).resolve()
MEMORY_MAX = 64_000_000
SECONDS_MAX = 1.0
# Tensors with more bytes than this are not read: with a stride of 0, a single element can make a tensor of any size.
BYTES_MAX = 8_000_000
PATIENCE = 20
# The reasons why tensorfs reads a checkpoint that torch refuses, by the message of torch.
UNDERSTOOD = {
    "'utf-8' codec can't decode": "the identity of the save is no text",
    # A tensor that tensorfs shows has all arguments. The tensor of this message is in the place of hooks.
    r"_rebuild_tensor_v2\(\) missing 6 required positional arguments": "what is no part of a tensor is not called",
}

# The peak memory of a process includes the memory of its parent at the fork, so a small process starts the command.
RUNNER = """
import json, os, subprocess, sys, time
for line in sys.stdin:
    words, out, err = json.loads(line)
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        for number, name in ((1, out), (2, err)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.execv(words[0], words)
    _, status, usage = os.wait4(pid, 0)
    took = [usage.ru_utime + usage.ru_stime, time.monotonic() - start]
    print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024, *took]), flush=True)
"""


class Helper:
    """A process that answers each line with a line. If it does not answer, it is started again."""

    def __init__(self, *words):
        self.words, self.process = words, None

    def ask(self, question):
        if self.process is None:
            self.process = subprocess.Popen(self.words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.process.stdin.write(json.dumps(question) + "\n")
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.end()
            return None
        return json.loads(line)

    def end(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def checkpoints():
    """The checkpoints of each kind."""
    kinds = collections.defaultdict(list)
    for path in sorted(FIXTURES.iterdir()):
        if path.is_file():
            kinds["legacy" if path.name.startswith("legacy") else "file"].append(path)
        elif path.name == "bin_index":
            kinds["index"].append(path)
        elif path.name.startswith("dcp_") and path.name != "dcp_safetensors":
            kinds["dcp"].append(path)
        elif path.name.startswith("rank_"):
            kinds["ranks"].append(path)
        elif path.name.startswith("deepspeed_"):
            kinds["universal" if "universal" in path.name else "zero"].append(path)
    return dict(kinds)


class Trial:
    """One changed checkpoint."""

    def __init__(self, number, seed, folder):
        self.number, self.folder, self.problems = number, folder, []
        chosen = random.Random(f"{seed}:{number}")
        kinds = checkpoints()
        self.kind = chosen.choice(["file", *kinds])
        seed_path = chosen.choice(kinds[self.kind])
        self.path, self.unchanged = folder / seed_path.name, seed_path
        (shutil.copytree if seed_path.is_dir() else shutil.copy)(seed_path, self.path)
        self.options = ["-o", "zero=fp32"] if self.kind == "zero" and chosen.random() < 0.5 else []
        self.change = self.changed(chosen, [path for path in FIXTURES.iterdir() if path.is_file()])
        self.reader = {"legacy": "file"}.get(self.kind, self.kind) + (", fp32" if self.options else "")
        if self.kind in ("file", "legacy", "dcp"):
            self.options += ["-o", "state=all"]

    def changed(self, chosen, others):
        if self.path.is_file():
            return f"{self.path.name}: {mutate.change_file(chosen, self.path, others)}"
        held = [path for path in sorted(self.path.rglob("*")) if path.is_file() and path.stat().st_size > 0]
        pickles = [path for path in held if path.suffix in (".pt", ".bin", ".distcp") or path.name == ".metadata"]
        if chosen.random() < 0.1:
            return f"{self.path.name}: {mutate.change_folder(chosen, pickles)}"
        # The file that has the offsets in the other files is changed as often as all other files together.
        first = [path for path in pickles if path.name == ".metadata" or "model_states" in path.name]
        path = chosen.choice(first if first and chosen.random() < 0.5 else pickles)
        return f"{self.path.name}: {mutate.change_file(chosen, path, others)}"


class Judge:
    """Runs the programs, and reports what they do wrong."""

    def __init__(self, folder, limits):
        self.folder, self.limits = folder, limits
        self.runner = Helper(sys.executable, "-S", "-E", "-c", RUNNER)
        self.torch = Helper(sys.executable, str(Path(__file__).parent / "readers.py"))
        self.counts, self.most, self.before = collections.Counter(), [0, 0.0], {}

    def tensorfs(self, trial, *words):
        out, err = self.folder / "out", self.folder / "err"
        took = self.runner.ask([[str(BIN), *map(str, words)], str(out), str(err)])
        if took is None:
            trial.problems.append(f"{words[0]} did not end")
            return 1, ""
        code, memory, seconds, waited = took
        self.most = [max(self.most[0], memory), max(self.most[1], seconds)]
        if code not in (0, 1) or "panicked" in err.read_text(errors="replace"):
            trial.problems.append(f"{words[0]} crashed, exit status {code}: {err.read_text(errors='replace')[:300]}")
        if self.limits and (memory > MEMORY_MAX or seconds > SECONDS_MAX):
            trial.problems.append(f"{words[0]} took {memory / 1e6:.1f} MB and {seconds:.2f} s")
        return code, out.read_text(errors="replace")

    def read_before(self, trial):
        """The tensors of the checkpoint before the change."""
        key = (trial.unchanged, *trial.options)
        if key not in self.before:
            self.before[key] = self.read(trial, trial.unchanged)
        return self.before[key]

    def read(self, trial, path):
        """The tensors that tensorfs reads, or None if it refuses."""
        code, text = self.tensorfs(trial, "ls", path, *trial.options, "--json")
        if code != 0:
            return None
        sets = json.loads(text)["sets"]
        if sum(one["bytes"] or 0 for one in sets) > BYTES_MAX:
            self.counts["too large to compare"] += 1
            return None
        written = self.folder / "written.safetensors"
        written.unlink(missing_ok=True)
        code, _ = self.tensorfs(trial, "consolidate", path, written, *trial.options)
        return tensors_of(written) if code == 0 else None

    def judge(self, trial):
        found = self.read(trial, trial.path)
        other = ("verify", trial.path, *trial.options) if trial.number % 2 else ("doctor", some_file(trial.path))
        self.tensorfs(trial, *other)
        expected = self.torch.ask({"kind": trial.reader, "path": str(trial.path)}) or {"refused": "did not end"}
        refused = expected.get("refused")
        if refused and trial.reader == "file" and found is not None:
            full = self.torch.ask({"kind": "file, full", "path": str(trial.path)})
            if full and full.get("tensors") == found and re.search("Unsupported|Weights only", refused):
                self.counts["read by both, with a name or an operation that weights_only does not know"] += 1
                return
        if found is None:
            self.counts["refused by both" if refused else "refused by tensorfs alone"] += 1
        elif refused:
            reason = next((why for words, why in UNDERSTOOD.items() if re.search(words, refused)), None)
            if reason is None and found.items() <= self.read_before(trial).items():
                reason = "the change is in no tensor that is shown"
            self.counts[f"refused by torch alone: {reason or 'not understood'}"] += 1
            if reason is None:
                trial.problems.append(f"read, and torch refuses: {refused}")
        else:
            self.counts["read by both"] += 1
            trial.problems += differences(found, expected["tensors"])

    def end(self):
        self.runner.end()
        self.torch.end()


def some_file(path):
    return path if path.is_file() else min(file for file in path.rglob("*") if file.is_file())


def tensors_of(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = (8 + length + place for place in entry["data_offsets"])
            found[name] = [entry["dtype"], entry["shape"], hashlib.sha256(data[start:end]).hexdigest()]
    return found


def differences(found, expected):
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            yield f"`{name}` is {found.get(name)} in tensorfs, {expected.get(name)} in torch"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the changed checkpoints with a finding")
    parser.add_argument("--no-limits", action="store_true", help="for a debug build, which is slow")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tensorfs-mutations-") as name:
        folder = Path(name)
        os.environ.update(TENSORFS_INDEX_DIR=str(folder / "index"), TENSORFS_CACHE_DIR="none")
        judge, wrong = Judge(folder, not args.no_limits), 0
        for number in range(args.first, args.first + args.count):
            place = folder / f"{number}"
            place.mkdir()
            trial = Trial(number, args.seed, place)
            judge.judge(trial)
            if trial.problems:
                wrong += 1
                print(f"{number} {trial.change}: " + "; ".join(trial.problems[:3]), flush=True)
                if args.keep:
                    shutil.copytree(place, args.keep / f"{number}", dirs_exist_ok=True)
            shutil.rmtree(place)
        judge.end()
    for what, count in sorted(judge.counts.items()):
        print(f"{count:7} {what}")
    print(f"{args.count} changed checkpoints, {wrong} findings; most memory {judge.most[0] / 1e6:.1f} MB, time {judge.most[1]:.2f} s")
    sys.exit(1 if wrong else 0)


main()

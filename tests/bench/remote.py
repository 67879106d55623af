#!/usr/bin/env python3
"""Times loads and mounted reads of a checkpoint on an HTTP server, in turns: cold, from the disk cache, and of the same
files in a local folder. `remote_peers.py` measures other programs.

    python tests/bench/remote.py --dir /scratch/remote --size 4G --runs 5 [--rate 8gbit] [--latency 20]

nginx serves the files on the loopback, from its page cache. `--rate` caps the loopback in a network namespace of its
own, and needs root; `--latency` needs libnginx-mod-http-echo. Each run starts new processes, and as root it has a cold
page cache. The first line of the results shows the server and the cap alone: eight plain clients that discard the
bytes. `from_pretrained` is measured if this Python has transformers, and if `www/model` in `--dir` is a model with its
`config.json`. `TENSORFS_BIN` names the program.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from importlib import util
from pathlib import Path

BIN = os.environ.get("TENSORFS_BIN", "tensorfs")
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
FILE = "model.safetensors"
CLIENTS = 8
TENSOR = 16 << 20
UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}

ECHO = Path("/usr/lib/nginx/modules/ngx_http_echo_module.so")

CONFIG = """
{modules} daemon off; pid {tmp}/nginx.pid; error_log {tmp}/error.log; worker_processes 2;
events {{}}
http {{
    access_log off; autoindex on; sendfile on; tcp_nopush on; keepalive_requests 1000000;
    client_body_temp_path {tmp}; proxy_temp_path {tmp}; fastcgi_temp_path {tmp}; uwsgi_temp_path {tmp}; scgi_temp_path {tmp};
    server {{ listen 127.0.0.1:{port}; root {root}; {delay} }}
}}
"""

DELAY = "location / {{ echo_sleep {seconds}; echo_exec @files; }} location @files {{ }}"


def size_of(text):
    return int(text[:-1]) << UNITS[text[-1]] if text[-1:] in UNITS else int(text)


def make(folder, size, shards):
    """Writes a checkpoint of random bytes, unless it is there."""
    if (folder / f"{FILE}.index.json").exists():
        return
    folder.mkdir(parents=True)
    chance, names, weight_map = random.Random(0), iter(range(1 << 30)), {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        count = max(size // shards // TENSOR, 1)
        tensors = [f"layer.{next(names)}" for _ in range(count)]
        header = {tensor: {"dtype": "U8", "shape": [TENSOR], "data_offsets": [at * TENSOR, (at + 1) * TENSOR]} for at, tensor in enumerate(tensors)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _ in tensors:
                file.write(chance.randbytes(TENSOR))
        weight_map.update(dict.fromkeys(tensors, name))
    (folder / f"{FILE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def cold():
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3")


def run(*words, **kwargs):
    done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def served(root, tmp, latency=0):
    """Runs nginx, which lets each request wait for `latency` milliseconds. Yields its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = tmp / "nginx.conf"
    modules = f"load_module {ECHO};" if latency else ""
    delay = DELAY.format(seconds=latency / 1000) if latency else ""
    config.write_text(CONFIG.format(tmp=tmp, port=port, root=root, modules=modules, delay=delay))
    process = subprocess.Popen([NGINX, "-c", config, "-p", tmp], stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


def plain_clients(port, folder):
    """Fetches all files by plain clients, which discard the bytes."""
    files = sorted(folder.glob("*.safetensors"))
    jobs = [(file.name, at, min(at + (8 << 20), file.stat().st_size)) for file in files for at in range(0, file.stat().st_size, 8 << 20)]
    lock = threading.Lock()

    def work():
        buffer = bytearray(1 << 20)
        with socket.create_connection(("127.0.0.1", port)) as client:
            while True:
                with lock:
                    if not jobs:
                        return
                    name, start, end = jobs.pop()
                client.sendall(f"GET /model/{name} HTTP/1.1\r\nHost: x\r\nRange: bytes={start}-{end - 1}\r\n\r\n".encode())
                head = b""
                while b"\r\n\r\n" not in head:
                    head += client.recv(1)
                left = end - start
                while left:
                    left -= client.recv_into(buffer, min(left, len(buffer)))

    threads = [threading.Thread(target=work) for _ in range(CLIENTS)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]


def read(path):
    buffer = bytearray(4 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


@contextlib.contextmanager
def mounted(source, tmp, *options):
    place = tmp / "mnt"
    place.mkdir(exist_ok=True)
    words = [word for option in options for word in ("-o", option)]
    run(BIN, "mount", source, place, *words)
    try:
        yield place
    finally:
        run(BIN, "umount", place)


@contextlib.contextmanager
def mounted_by(words, place):
    """A mount of another program on `place`."""
    place.mkdir(exist_ok=True)
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(400):
            if os.path.ismount(place):
                break
            time.sleep(0.05)
        else:
            process.kill()
            sys.exit(f"{words[0]} does not mount")
        yield
    finally:
        if os.path.ismount(place):
            run("umount", place)
        process.wait()


def timed(work):
    start = time.monotonic()
    work()
    return time.monotonic() - start


def timed_mount(source, tmp, *options):
    """Seconds to read all of the mounted file, and seconds until the mount answered."""
    start = time.monotonic()
    with mounted(source, tmp, *options) as place:
        answered = time.monotonic() - start
        seconds = timed(lambda: read(place / FILE))
    return seconds, answered


def timed_load(source, *options):
    """Seconds until all bytes were in memory, as the command reports them. They do not include the end of the process,
    which frees the memory."""
    words = [word for option in options for word in ("-o", option)]
    return json.loads(run(BIN, "load", "--json", source, *words))["total_s"]


FROM_PRETRAINED = """
import sys, time
from transformers import AutoModelForCausalLM, LlamaForCausalLM  # transformers imports both at their first use
start = time.monotonic()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
for parameter in model.parameters():
    parameter.detach().view(-1)[::1024].float().sum()
print(time.monotonic() - start)
"""


def timed_from_pretrained(source, tmp, *options):
    """Seconds of `from_pretrained` on the mounted folder, with a touch of all pages, but without imports."""
    with mounted(source, tmp, *options) as place:
        return float(run(sys.executable, "-c", FROM_PRETRAINED, place).split()[-1])


def timed_second_read(source, tmp, *options):
    """Seconds to read all of the mounted file for the second time, with a cold page cache."""
    with mounted(source, tmp, *options) as place:
        read(place / FILE)
        cold()
        return timed(lambda: read(place / FILE))


def cases(args, tmp, port, folder):
    """Yields the name of each case, and a function that does one run of the case and returns its seconds."""
    url = f"http://127.0.0.1:{port}/model"
    cache = tmp / "cache"
    kept = f"cache-dir={cache},cache-dir-size={max(4 * size_of(args.size), 64 << 20)}"

    def load(source, *options):
        return lambda: timed_load(source, *options)

    def emptied(work):
        def once():
            shutil.rmtree(cache, ignore_errors=True)
            return work()

        return once

    yield "server and cap alone", lambda: timed(lambda: plain_clients(port, folder))
    yield "load, cold", load(url)
    yield "mount, cold, no disk cache", lambda: timed_mount(url, tmp, "cache-dir=none,index-dir=none")[0]
    if (folder / "config.json").exists() and util.find_spec("transformers"):
        yield "from_pretrained, cold, no disk cache", lambda: timed_from_pretrained(url, tmp, "cache-dir=none,index-dir=none")
    yield "mount, cold, fills the disk cache", emptied(lambda: timed_mount(url, tmp, f"{kept},index-dir=none")[0])
    yield "mount, from the disk cache", lambda: timed_mount(url, tmp, f"{kept},index-dir=none")[0]
    yield "mount, of a local folder", lambda: timed_mount(folder, tmp, "index-dir=none,passthrough=never")[0]
    yield "mount, from the disk cache, second read", lambda: timed_second_read(url, tmp, f"{kept},index-dir=none")
    yield "mount, of a local folder, second read", lambda: timed_second_read(folder, tmp, "index-dir=none,passthrough=never")
    yield "load, from the disk cache", load(url, kept)
    yield "load, of a local folder", load(folder)


def measure(args):
    folder = args.dir / "www" / "model"
    make(folder, size_of(args.size), args.shards)
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    tmp = args.dir / "tmp"
    tmp.mkdir(exist_ok=True)
    with served(folder.parent, tmp, args.latency) as port:
        rows = {}
        for _ in range(args.runs):
            for name, work in cases(args, tmp, port, folder):
                cold()
                if "local folder" not in name and "from the disk cache" not in name:
                    # A real server has a disk of its own, so the files are read into the page cache before the run.
                    [read(file) for file in folder.iterdir()]
                rows.setdefault(name, []).append(total / work() / 1e9)
                print(f"  {rows[name][-1]:6.3f} GB/s  {name}", file=sys.stderr, flush=True)
    cap = f", capped at {args.rate}" if args.rate else ""
    cap += f", {args.latency} ms to the first byte" if args.latency else ""
    print(f"{total / 1e9:.2f} GB in {args.shards} shards{cap}; GB/s, median of {args.runs} (least to most)")
    for name, found in rows.items():
        print(f"  {statistics.median(found):6.3f}  ({min(found):.3f} to {max(found):.3f})  {name}")
    shutil.rmtree(tmp)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="scratch folder; the checkpoint stays there")
    parser.add_argument("--size", default="1G")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rate", help="cap of the loopback, as tc writes it: 8gbit")
    parser.add_argument("--latency", type=int, default=0, help="milliseconds that the server lets each request wait")
    args = parser.parse_args()
    if NGINX is None:
        sys.exit("needs nginx")
    if args.latency and not ECHO.exists():
        sys.exit("--latency needs libnginx-mod-http-echo")
    args.dir = args.dir.resolve()
    if args.rate and "TENSORFS_BENCH_CAPPED" not in os.environ:
        os.environ["TENSORFS_BENCH_CAPPED"] = "1"
        os.execvp("unshare", ["unshare", "--net", "--mount", sys.executable, *sys.argv])
    if args.rate:
        run("ip", "link", "set", "lo", "up")
        run("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", args.rate, "burst", "2mb", "latency", "20ms")
    measure(args)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Times other loaders of remote checkpoints with the server of `remote.py`, in turns with tensorfs.

    python tests/bench/remote_peers.py --dir /scratch/remote --size 1G --runs 3

Measures those of the packages obstore, runai-model-streamer, s3torchconnector, tensorizer and fsspec that this Python
has. If they are installed, it also measures `rclone mount`, with its default reads and with eight reads at a time, and
`s3fs`. Each run is a process of its own. The clock of a loader runs from its first request until the last bytes are in
memory, without imports and the end of the process. The files are in the page cache of the server. `TENSORFS_BIN` names
the program.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from pathlib import Path

import remote

TENSORS = "all.tensors"
PART = 8 << 20


def by_obstore(port, files):
    import obstore
    from obstore.store import S3Store

    store = S3Store("model", endpoint=f"http://127.0.0.1:{port}", skip_signature=True, region="x", client_options={"allow_http": True})

    def shard(file):
        size = file.stat().st_size
        starts = list(range(0, size, PART))
        return obstore.get_ranges(store, file.name, starts=starts, ends=[min(start + PART, size) for start in starts], coalesce=0)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(shard, files))


def by_runai(port, files):
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([f"s3://model/{file.name}" for file in files])
        for _ in streamer.get_tensors():
            pass


def by_s3torchconnector(port, files):
    from s3torchconnector._s3client import S3Client, S3ClientConfig

    config = S3ClientConfig(unsigned=True, force_path_style=True, throughput_target_gbps=100.0)
    client = S3Client("us-east-1", endpoint=f"http://127.0.0.1:{port}", s3client_config=config)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda file: client.get_object("model", file.name).read(), files))


def by_fsspec(port, files):
    import fsspec
    import safetensors.torch

    files_of = fsspec.filesystem("http")
    urls = [f"http://127.0.0.1:{port}/model/{file.name}" for file in files]
    [safetensors.torch.load(data) for data in files_of.cat(urls).values()]


def by_tensorizer(port, files):
    from tensorizer import TensorDeserializer, stream_io

    url = f"http://127.0.0.1:{port}/tensorizer/{TENSORS}"
    with TensorDeserializer(stream_io.open_stream(url, "rb"), device="cpu", num_readers=4) as tensors:
        [tensors[name] for name in tensors]


PEERS = {
    "obstore": by_obstore,
    "runai_model_streamer": by_runai,
    "s3torchconnector": by_s3torchconnector,
    "fsspec": by_fsspec,
    "tensorizer": by_tensorizer,
}


def make_tensors(folder):
    """Writes the same tensors in the format of tensorizer."""
    made = folder.with_name("tensorizer") / TENSORS
    if made.exists():
        return
    import safetensors.torch
    from tensorizer import TensorSerializer

    made.parent.mkdir(exist_ok=True)
    with contextlib.closing(TensorSerializer(made)) as serializer:
        for file in shards(folder):
            serializer.write_state_dict(safetensors.torch.load_file(file))


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def by_rclone(port, tmp, names, *options):
    words = [shutil.which("rclone"), "mount", f":http,url='http://127.0.0.1:{port}/model':", tmp / "peer"]
    return by_mount([*words, "--read-only", "--config", "/dev/null", *options], tmp, names)


def by_s3fs(port, tmp, names):
    options = f"url=http://127.0.0.1:{port},use_path_request_style,public_bucket=1,ro,parallel_count=8,multipart_size=10"
    return by_mount([shutil.which("s3fs"), "model", tmp / "peer", "-f", "-o", options], tmp, names)


def by_mount(words, tmp, names):
    """Seconds to read the files on the mount of another program."""
    place = tmp / "peer"
    with remote.mounted_by(words, place):
        return remote.timed(lambda: [remote.read(place / name) for name in names])


def by_program(name, port, folder):
    """Runs the loader in a process of its own. Returns the seconds that the process reports."""
    environment = {
        **os.environ,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "RUNAI_STREAMER_CONCURRENCY": "16",
    }
    words = [sys.executable, __file__, "--dir", folder, "--alone", name, "--port", port]
    return float(remote.run(*words, env=environment).split()[-1])


def alone(args):
    files = shards(args.dir)
    work = PEERS[args.alone]
    for module in (args.alone, "torch", "safetensors.torch"):
        __import__(module)
    print(remote.timed(lambda: work(args.port, files)))


def cases(args, port, tmp, folder):
    url = f"http://127.0.0.1:{port}/model"
    names = [file.name for file in shards(folder)]
    yield "server alone", lambda: remote.timed(lambda: remote.plain_clients(port, folder))
    yield "load: tensorfs", lambda: remote.timed_load(url)
    for name in PEERS:
        if util.find_spec(name):
            yield f"load: {name}", lambda name=name: by_program(name, port, folder)
    yield "mount: tensorfs", lambda: remote.timed_mount(url, tmp, "cache-dir=none,index-dir=none")[0]
    if shutil.which("rclone"):
        yield "mount: rclone", lambda: by_rclone(port, tmp, names)
        many = ("--vfs-read-chunk-streams", "8", "--vfs-read-chunk-size", "8M")
        yield "mount: rclone, 8 streams", lambda: by_rclone(port, tmp, names, *many)
    if shutil.which("s3fs"):
        yield "mount: s3fs", lambda: by_s3fs(port, tmp, names)


def measure(args):
    folder = args.dir / "www" / "model"
    remote.make(folder, remote.size_of(args.size), args.shards)
    if util.find_spec("tensorizer"):
        make_tensors(folder)
    total = sum(file.stat().st_size for file in shards(folder))
    tmp = args.dir / "tmp"
    tmp.mkdir(exist_ok=True)
    rows = {}
    with remote.served(folder.parent, tmp) as port:
        for _ in range(args.runs):
            for name, work in cases(args, port, tmp, folder):
                remote.cold()
                [remote.read(file) for file in folder.parent.glob("*/*")]
                try:
                    rows.setdefault(name, []).append(total / work() / 1e9)
                except SystemExit as e:
                    print(f"{name}: {e}", file=sys.stderr)
    print(f"{total / 1e9:.2f} GB in {args.shards} shards; GB/s, median of {args.runs} (least to most)")
    for name, found in rows.items():
        if found:
            print(f"  {statistics.median(found):6.3f}  ({min(found):.3f} to {max(found):.3f})  {name}")
    shutil.rmtree(tmp)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="scratch folder; the checkpoint stays there")
    parser.add_argument("--size", default="1G")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--alone", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.dir = args.dir.resolve()
    alone(args) if args.alone else measure(args)


if __name__ == "__main__":
    main()

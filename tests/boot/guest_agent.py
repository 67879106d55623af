"""Runs in the guest. It reads commands from the virtio port, one JSON object on each line, and answers each with its
result."""

import json
import os
import signal
import subprocess
import tempfile
import time

PORT = "/dev/virtio-ports/tensorfs.boot"
OUTPUT_MAX = 200_000


def main():
    port = os.open(PORT, os.O_RDWR)
    waiting = b""
    while True:
        data = os.read(port, 65536)
        if not data:
            # The host is not connected yet.
            time.sleep(0.05)
            continue
        waiting += data
        while b"\n" in waiting:
            line, waiting = waiting.split(b"\n", 1)
            send(port, answer(json.loads(line)))


def send(port, reply):
    data = json.dumps(reply).encode() + b"\n"
    while data:
        data = data[os.write(port, data[:4096]) :]


def answer(call):
    with tempfile.TemporaryFile() as output:
        # The output goes to a file and not to a pipe: a daemon that keeps a pipe open would delay the answer.
        process = subprocess.Popen(
            ["/bin/sh", "-c", call["command"]], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(call["timeout"])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = None
        output.seek(0)
        return {"id": call["id"], "code": code, "output": output.read(OUTPUT_MAX).decode(errors="replace")}


main()

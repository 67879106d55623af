"""Mounts a checkpoint for the time of a `with` block, by the program `tensorfs`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import numbers
import os
import shutil
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union

from ._errors import error
from ._open import dtype_word
from ._tails import UnprovenTailWarning
from ._tensorfs import real_name

# Prints the path of the mount, and then waits for the end of standard input, which comes at the end of the block or of
# this process.
_HOLD = "printf '%s\\0' \"$TENSORFS_MOUNT\"; exec cat > /dev/null"

_MISSING = (
    "tensorfs.mount runs the program tensorfs, which is not in PATH: install it (a wheel of tensorfs-loader has it, and the "
    "Debian package), or name it in TENSORFS_BIN"
)


@contextlib.contextmanager
def mount(source: Union[str, os.PathLike[str]], **options: Any) -> Iterator[Path]:
    """Mounts a checkpoint, or a tree of them, and unmounts it at the end of the block.

        with tensorfs.mount("run7", dtype="bf16") as folder:
            model = AutoModel.from_pretrained(folder)

    `options` are the options of `tensorfs mount -o`, with `_` in place of `-`. Their values are words, numbers or
    paths, a list of them for an option that may be given more than once, and True for an option without a value.
    `dtype` may also be a dtype of torch. The mount also ends when this process ends, even if it is killed. Files that
    are still open can be read to their end.
    """
    program = os.environ.get("TENSORFS_BIN") or shutil.which("tensorfs") or _installed_with_us()
    if not program:
        raise FileNotFoundError(_MISSING)
    path = os.fsdecode(source)
    words = [program, "run", os.path.join(".", path) if path.startswith("-") else path]
    for name, value in options.items():
        words += (part for text in _texts(name, value) for part in ("-o", text))
    with tempfile.TemporaryFile() as said:
        try:
            # The new session keeps Ctrl-C from the program: this process gets it, and unmounts at the end of the block.
            process = subprocess.Popen(
                [*words, "--", "sh", "-c", _HOLD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise FileNotFoundError(f"{program}: not found; {_MISSING}") from None
        owner, place = os.getpid(), b""
        try:
            assert process.stdout is not None
            with process.stdout as output:
                # `tensorfs run` keeps the pipe open until it ends, so this reads up to the NUL byte only.
                while not place.endswith(b"\0") and (more := os.read(output.fileno(), 4096)):
                    place += more
            said.seek(0)
            lines = [line.partition(": ")[2] or line for line in said.read().decode(errors="replace").splitlines()]
            if not place.endswith(b"\0"):
                message = "; ".join(lines) or f"tensorfs ended with status {process.wait()}"
                raise error(message, "usage" if process.wait() == 2 else "io", path=real_name(path))
            for line in lines:
                warnings.warn(line, UnprovenTailWarning if "unproven" in line else UserWarning, stacklevel=3)
            yield Path(os.fsdecode(place[:-1]))
        finally:
            # A child that was forked inside of the block leaves the unmount to its parent.
            if os.getpid() == owner:
                assert process.stdin is not None
                process.stdin.close()
                if place.endswith(b"\0"):
                    # A forked child may still hold the other pipe open, so that closing it here is not enough.
                    process.terminate()
                elif process.poll() is None:
                    # The daemon may be waiting for the source. It is in the process group of the program until the
                    # mount answers.
                    os.killpg(process.pid, signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.5)
                    # A daemon that cannot end yet removes the mount as soon as it can.
                    process.kill()
                process.wait()


def _installed_with_us() -> str | None:
    """The program of the installed wheel. It is not in PATH if the Python environment is not activated."""
    try:
        files = importlib.metadata.files("tensorfs-loader") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (str(file.locate()) for file in files if file.name == "tensorfs")
    return next((path for path in found if os.access(path, os.X_OK) and not os.path.isdir(path)), None)


def _texts(name: str, value: Any) -> Iterator[str]:
    """The texts for `-o` of one option: none for an option that is off, or one for each value."""
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _texts(name, one)
        return
    if value is None or value is False:
        return
    key = name if name == "allow_other" else name.replace("_", "-")
    if value is True:
        yield key
        return
    if name == "dtype":
        value = dtype_word(value)
    if not isinstance(value, (str, numbers.Real, os.PathLike)):
        raise TypeError(f"{name}: expected a word, a number, a path or a list of them, not {type(value).__name__}")
    text = os.fsdecode(value) if isinstance(value, os.PathLike) else str(value)
    yield f"{key}={text}".replace("\\", "\\\\").replace(",", "\\,")

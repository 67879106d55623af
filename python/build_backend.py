"""The build backend of `pip install ./python`. maturin builds the package. cargo builds the command `tensorfs`, which
the wheel contains too.

Environment variables say what is built. `python/wheel` sets them for a release:

- TENSORFS_WHEEL_PROFILE: the cargo profile. Without this variable it is `release`.
- TENSORFS_WHEEL_TARGET and TENSORFS_WHEEL_PLATFORM: a Rust target such as `aarch64-unknown-linux-gnu`, and the platform
  tag of its wheels, such as `manylinux_2_28`. zig links against the oldest C library that the tag allows. Without these
  variables, the wheel is for the processor and the C library of the build machine.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import maturin
from maturin import (  # noqa: F401
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

HERE = Path(__file__).resolve().parent
WORKSPACE = HERE.parent
# maturin packs this folder into the wheel: its name is the name of the native module, with the suffix `.data`. pip
# installs the scripts in this folder.
DATA = HERE / "tensorfs._tensorfs.data"

HELPER = """\
#!/bin/sh
# The helper of mount(8): the program tensorfs in the folder of this file, also if a link leads here.
file=$(readlink -f -- "$0") && exec "${file%/*}/tensorfs" internal mount-helper "$@"
"""


class UnsupportedOperation(Exception):
    """A build frontend expects this exception from a hook that the backend does not support (PEP 517)."""


def build_sdist(sdist_directory, config_settings=None):
    """Always raises `UnsupportedOperation`, because maturin would make a source package that lacks the command."""
    raise UnsupportedOperation("the wheel holds the command, which is built from the whole repository: make a checkout")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds the wheel. The folder `DATA`, which holds the scripts of the wheel, exists only during the build."""
    profile = os.environ.get("TENSORFS_WHEEL_PROFILE", "release")
    target = os.environ.get("TENSORFS_WHEEL_TARGET")
    arguments = ["--locked", "--profile", profile]
    if target:
        arguments += ["--zig", "--target", target, "--compatibility", os.environ["TENSORFS_WHEEL_PLATFORM"]]
        arguments += ["--compression-level", "9"]
    given = os.environ.get("MATURIN_PEP517_ARGS", "")
    os.environ["MATURIN_PEP517_ARGS"] = f"{given} {shlex.join(arguments)}"
    try:
        place_command(build_command(profile, target), with_symbols=target is None)
        # The metadata in `metadata_directory` are for a wheel of the build machine, so another target does not use
        # them.
        return maturin.build_wheel(wheel_directory, config_settings, None if target else metadata_directory)
    finally:
        os.environ["MATURIN_PEP517_ARGS"] = given
        shutil.rmtree(DATA, ignore_errors=True)


def build_command(profile, target):
    """Builds the program `tensorfs`, and returns its path."""
    cargo = ["cargo", "build"]
    where = []
    environment = dict(os.environ)
    if target:
        cargo = ["cargo-zigbuild", "zigbuild"]
        where = ["--target", with_glibc(target, environment["TENSORFS_WHEEL_PLATFORM"])]
        if target.endswith("musl"):
            # Links dynamically, as maturin does for the native module: a static program cannot load libraries at run
            # time.
            flags = environment.get("RUSTFLAGS", "")
            environment["RUSTFLAGS"] = f"{flags} -C target-feature=-crt-static".strip()
    command = [*cargo, "--locked", "--profile", profile, "--package", "tensorfs-mount", "--bin", "tensorfs", *where]
    print("Running `{}`".format(shlex.join(command)), flush=True)
    # pip reads the standard output of a build backend, so cargo writes to standard error.
    subprocess.run(command, cwd=WORKSPACE, env=environment, stdout=sys.stderr, check=True)
    folder = "debug" if profile == "dev" else profile
    return Path(environment.get("CARGO_TARGET_DIR", WORKSPACE / "target")).joinpath(*filter(None, [target]), folder, "tensorfs")


def with_glibc(target, platform):
    """The target in the notation of cargo-zigbuild: with the glibc version of a platform tag such as
    `manylinux_2_28`."""
    found = re.fullmatch(r"manylinux_(\d+)_(\d+)", platform)
    return f"{target}.{found[1]}.{found[2]}" if found else target


def place_command(program, with_symbols):
    """Puts the program `tensorfs` and the helper of mount(8) into the folder from which maturin takes scripts."""
    scripts = DATA / "scripts"
    shutil.rmtree(DATA, ignore_errors=True)
    scripts.mkdir(parents=True)
    if with_symbols:
        subprocess.run(["strip", "-o", scripts / "tensorfs", program], check=True)
    else:
        # The cargo profile of a release has stripped the program already. `strip` of the build machine may lack its
        # architecture.
        shutil.copyfile(program, scripts / "tensorfs")
    helper = scripts / "mount.tensorfs"
    helper.write_text(HELPER)
    for script in scripts.iterdir():
        script.chmod(0o755)

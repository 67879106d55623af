"""Makes `cast.ptx` of `cast.cu`, with no GPU and no CUDA toolkit: `python src/device/make_ptx.py [--check]`.

Needs the compiler that NVIDIA ships as a package: `pip install nvidia-cuda-nvrtc-cu12==12.0.76`. No newer one: its
text would be of a later PTX version, which older drivers refuse. With `--check` it compares and writes nothing.
"""

import ctypes
import importlib.metadata
import sys
from pathlib import Path

PACKAGE = "nvidia-cuda-nvrtc-cu12"
VERSION = "12.0.76"
# With C++11 and later the compiler adds variables of its own to the text.
OPTIONS = ["--gpu-architecture=compute_80", "--std=c++03"]
SOURCE = Path(__file__).with_name("cast.cu")
PTX = Path(__file__).with_name("cast.ptx")


def installed():
    """The compiler's library, or None if the package is not installed or has another version."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    libraries = [file for file in package.files if file.name.startswith("libnvrtc.so")]
    return package.locate_file(libraries[0]) if package.version == VERSION and libraries else None


def make(library):
    """The PTX text of SOURCE."""
    nvrtc = ctypes.CDLL(str(library))
    program = ctypes.c_void_p()

    def call(name, *arguments):
        code = getattr(nvrtc, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} returned {code}\n{log() if program else ''}")

    def text(of, length_of):
        size = ctypes.c_size_t()
        getattr(nvrtc, length_of)(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, of)(program, buffer)
        return buffer.value.decode()

    def log():
        return text("nvrtcGetProgramLog", "nvrtcGetProgramLogSize")

    options = (ctypes.c_char_p * len(OPTIONS))(*[option.encode() for option in OPTIONS])
    source = SOURCE.read_bytes()
    call("nvrtcCreateProgram", ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None)
    call("nvrtcCompileProgram", program, len(OPTIONS), options)
    return text("nvrtcGetPTX", "nvrtcGetPTXSize")


def main():
    library = installed()
    if library is None:
        sys.exit(f"{PACKAGE} {VERSION} is not installed here: pip install {PACKAGE}=={VERSION}")
    ptx = make(library)
    if sys.argv[1:] == ["--check"]:
        if ptx != PTX.read_text():
            sys.exit(f"{PTX.name} is not what {SOURCE.name} makes: run this without --check and commit both")
    else:
        PTX.write_text(ptx)


if __name__ == "__main__":
    main()

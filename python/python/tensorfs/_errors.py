"""The exceptions of this package, and the conversion of errors of the native part to exceptions."""

from __future__ import annotations

import os
import sys


class SafetensorError(Exception):
    """A checkpoint is refused, or a request is wrong.

    If `safetensors` is imported, the exception is also an instance of `safetensors.SafetensorError`.
    """

    kind: str | None = None
    """The kind of the error in one word, such as `dcp_hole`."""
    path: str | None = None
    """The file or folder at fault."""
    tensor: str | None = None
    """The name of the tensor at fault. If the error is about a load of several tensors: the name of the first tensor of
    this load, and the number of the others."""


class DtypeError(SafetensorError, TypeError):
    """The framework lacks the dtype of a tensor."""


class MismatchError(SafetensorError, RuntimeError):
    """Names, shapes or dtypes differ from the checkpoint, or there is no memory to load into."""


class GroupError(SafetensorError):
    """A rank of a process group died, does not answer, or sees other files. All ranks raise the same error."""

    rank: int | None = None
    """The rank at fault."""


CLASSES = {cls.__name__: cls for cls in (DtypeError, MismatchError, GroupError, SafetensorError)}
"""The exceptions, each before the class that it is derived from."""


def shown(text: str) -> str:
    """`text`, escaped for one line of a terminal or a log: names of files and tensors may hold any character."""
    if text.isprintable():
        return text
    # The native part escapes these in the same way.
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return "".join(c if c.isprintable() else short.get(c, f"\\u{{{ord(c):x}}}") for c in text)


def error(
    message: str,
    kind: str = "usage",
    *,
    cls: type[SafetensorError] = SafetensorError,
    path: str | None = None,
    tensor: str | None = None,
) -> SafetensorError:
    """Makes an exception for the caller to raise."""
    genuine = getattr(sys.modules.get("safetensors"), "SafetensorError", None)
    made = (cls if genuine is None else _derived(cls, genuine))(shown(message))
    made.kind, made.path, made.tensor = kind, path, tensor
    return made


_made: dict[tuple[type, type], type[SafetensorError]] = {}


def _derived(cls: type[SafetensorError], genuine: type[Exception]) -> type[SafetensorError]:
    """A subclass of `cls` and of the exception of safetensors."""
    found = _made.get((cls, genuine))
    if found is not None:
        return found

    def reduce(self: SafetensorError) -> object:
        # Pickles the exception as `cls`, because only processes that import safetensors have the derived class.
        return _unpickled, (cls, self.args, self.__dict__)

    names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce__": reduce}
    return _made.setdefault((cls, genuine), type(cls.__name__, (cls, genuine), names))


def _unpickled(cls: type[SafetensorError], args: tuple[str], facts: dict[str, object]) -> SafetensorError:
    made = error(*args, cls=cls)
    made.__dict__.update(facts)
    return made


def not_found(path: object) -> FileNotFoundError:
    """The error that `safetensors` raises for a file that does not exist."""
    missing = FileNotFoundError(shown(f"No such file or directory: {path}"))
    missing.errno = 2
    return missing


def of_native(kind: str, message: str, path: str | None, tensor: str | None, errno: int | None) -> Exception:
    """The exception for an error of the native part."""
    if errno is None:
        if tensor is not None and shown(tensor) not in message:
            message = f"{message} (while loading {tensor})"
        return error(message, kind, path=path, tensor=tensor)
    if tensor is not None:
        message = f"{message} (while loading {tensor})"
    return OSError(errno, shown(message), None if path is None else os.fspath(path))

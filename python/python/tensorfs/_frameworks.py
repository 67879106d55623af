"""One class for each framework: it allocates memory, and makes tensors of the bytes that are loaded into that
memory."""

from __future__ import annotations

import importlib
from typing import Any, Sequence

from ._errors import DtypeError, MismatchError, error
from ._tensorfs import Area, Tensor

PAGE = 4096
"""Bytes of a page. A region of a plan begins at the first page boundary of the memory that is allocated for it."""

Placed = tuple[str, int, int, int, str, tuple[int, ...]]
"""A tensor in a region of a plan: name, number of the region, first byte in the region, length in bytes, dtype and
shape."""

_SHARED = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "U64": "uint64",
    "I64": "int64",
    "U32": "uint32",
    "I32": "int32",
    "U16": "uint16",
    "I16": "int16",
    "U8": "uint8",
    "I8": "int8",
    "C64": "complex64",
}
_SMALL_FLOATS = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
PACKED = "F4"
"""torch stores two elements of this dtype in one element of `float4_e2m1fn_x2`."""

_TORCH = {**_SHARED, **_SMALL_FLOATS, "BOOL": "bool", PACKED: "float4_e2m1fn_x2"}


class Torch:
    """Tensors of torch, in memory of torch."""

    name = "pytorch"
    finish: Any = None
    # If a file is mapped, safetensors indexes its slices by torch. So the rules of torch apply here too.
    indexes_itself = True

    def __init__(self, gpu: int | None) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        self._on_cpu = gpu is None
        self._dtypes: dict[str, Any] = {}
        self._makers: dict[str, Any] = {}
        self._names: dict[Any, str] | None = None

    def dtype(self, dtype: str, name: str) -> Any:
        found = self._known(dtype)
        if found is None:
            raise _unknown(dtype, name, f"torch {self._torch.__version__}")
        return found

    def _known(self, dtype: str) -> Any:
        found = self._dtypes.get(dtype)
        if found is None:
            found = getattr(self._torch, _TORCH.get(dtype, "-"), None)
            if found is not None:
                self._dtypes[dtype] = found
        return found

    def check(self, dtype: str, shape: Sequence[int], name: str) -> None:
        """Raises an error for a tensor that torch cannot represent."""
        self.dtype(dtype, name)
        _packed(dtype, shape, name)

    def dtype_name(self, dtype: Any) -> str | None:
        """The name that headers use for a dtype of torch. None if there is none."""
        if self._names is None:
            found = ((getattr(self._torch, word, None), name) for name, word in _TORCH.items())
            self._names = {dtype: name for dtype, name in found if dtype is not None}
        return self._names.get(dtype)

    def empty(self, dtype: str, shape: Sequence[int], name: str) -> tuple[Any, int]:
        wanted = self.dtype(dtype, name)
        try:
            made = self._torch.empty(_packed(dtype, shape, name), dtype=wanted, device=self._device)
        except TypeError:
            raise _too_large("torch", shape, name, "a size from 2^63 on") from None
        return made, self._address(made, wanted)

    def maker(self, dtype: str) -> Any:
        """A function that takes a shape, and returns a new tensor and its address, faster than `empty`. None for a
        dtype that only `empty` supports."""
        found = self._makers.get(dtype)
        if found is None:
            found = self._makers[dtype] = self._maker(dtype)
        return found

    def _maker(self, dtype: str) -> Any:
        wanted, torch, device, address = self._known(dtype), self._torch, self._device, self._address
        if wanted is None or dtype == PACKED:
            return None

        def make(shape: tuple[int, ...]) -> tuple[Any, int]:
            made = torch.empty(shape, dtype=wanted, device=device)
            return made, address(made, wanted)

        return make

    def area(self, length: int) -> tuple[Any, int, int]:
        made = self._torch.empty(length, dtype=self._torch.uint8, device=self._device)
        return made, self._address(made, self._torch.uint8), length

    def _address(self, made: Any, wanted: Any) -> int:
        """The address of a new tensor. Refuses a tensor without the requested dtype and device, or without memory."""
        # Another library may have replaced torch.empty. `is_cpu` is faster than `device.type`, which makes a text.
        is_there = made.is_cpu if self._on_cpu else made.device.type == self._device.type
        if made.dtype is not wanted or not is_there:
            raise error(
                f"torch.empty gives {made.dtype} on {made.device} here where {wanted} on {self._device} is wanted, "
                "as within deepspeed's zero.Init; load outside of it",
                cls=MismatchError,
            )
        # Within some `with` blocks, such as FakeTensorMode, torch makes tensors without memory.
        address = made.data_ptr() if type(made) is self._torch.Tensor else 0
        if address == 0 and (made.numel() or type(made) is not self._torch.Tensor):
            raise error(
                f"torch gives a {type(made).__name__} without memory here, as in FakeTensorMode; load outside of it",
                cls=MismatchError,
            )
        return address

    def stream(self) -> int | None:
        """The current stream of the GPU, whose operations may still use memory that torch has allocated again. None on
        the CPU."""
        if self._on_cpu:
            return None
        return self._torch.cuda.current_stream(self._device).cuda_stream

    def over(self, area: Area) -> Any:
        """A tensor over the bytes of an area, of which `views` makes tensors."""
        # Views of a tensor that was made in inference mode would always be inference tensors.
        with self._torch.inference_mode(False):
            return self._torch.frombuffer(_buffer(area), dtype=self._torch.uint8)

    def mode(self) -> object:
        """The state of torch that decides, beside the arguments, which kind of tensor torch makes."""
        return self._torch.is_inference_mode_enabled(), type(self._torch.empty(0))

    def views(self, areas: Sequence[tuple[Any, int]], placed: Sequence[Placed]) -> dict[str, Any]:
        """Makes the tensors of filled areas, by name."""
        as_strided, on_cpu = self._torch.as_strided, self._on_cpu
        # There may be many tensors, so each one takes only one call of torch.
        typed: dict[tuple[int, str], tuple[Any, int, int]] = {}
        tensors = {}
        for name, region, offset, nbytes, dtype, shape in placed:
            if nbytes == 0:
                tensors[name] = self.empty(dtype, shape, name)[0]
                continue
            found = typed.get((region, dtype))
            if found is None:
                area, address = areas[region]
                wanted = self.dtype(dtype, name)
                found = (area.view(wanted), -address % PAGE if on_cpu else 0, wanted.itemsize)
                typed[region, dtype] = found
            base, skipped, width = found
            if dtype == "F4":
                shape = _packed(dtype, shape, name)
            if len(shape) == 1:
                strides: tuple[int, ...] = (1,)
            elif len(shape) == 2:
                strides = (shape[1], 1)
            else:
                strides = _strides(shape)
            tensors[name] = as_strided(base, shape, strides, (skipped + offset) // width)
        return tensors

    def of_bytes(self, data: bytearray, dtype: str, shape: Sequence[int], name: str) -> Any:
        """A tensor that uses the memory of `data`."""
        if not data:
            return self.empty(dtype, shape, name)[0]
        made = self._torch.frombuffer(data, dtype=self.dtype(dtype, name))
        return made.reshape(_packed(dtype, shape, name))

    def stepped(self, tensor: Any, steps: tuple[slice, ...]) -> Any:
        return tensor[steps].clone(memory_format=self._torch.contiguous_format)

    def refuse(self, index: Any, shape: Sequence[int]) -> None:
        """Raises the exception of torch for an index that does not fit."""
        # Indexes a tensor of this shape whose elements share one byte. A meta tensor cannot be indexed by a mask.
        self._torch.zeros((), dtype=self._torch.uint8, device=self._device).expand(tuple(shape))[index]


class Numpy:
    """Arrays of numpy, in memory of numpy."""

    name = "numpy"
    indexes_itself = False
    finish: Any = None
    """The function that makes a tensor of a filled array. None if the caller gets the array itself."""

    def __init__(self, gpu: int | None) -> None:
        import numpy

        _only_cpu(self.name, gpu)

        self._numpy = numpy
        self._dtypes: dict[str, Any] = {}

    def stream(self) -> None:
        return None

    def over(self, area: Area) -> Any:
        return _buffer(area)

    def mode(self) -> object:
        return None

    def dtype(self, dtype: str, name: str) -> Any:
        found = self._dtypes.get(dtype)
        if found is None:
            found = self._dtypes[dtype] = self._find(dtype, name)
        return found

    def check(self, dtype: str, shape: Sequence[int], name: str) -> None:
        """Raises an error for a tensor that numpy cannot represent."""
        self.dtype(dtype, name)

    def _find(self, dtype: str, name: str) -> Any:
        if dtype == "BOOL":
            return self._numpy.dtype(bool)
        if dtype in _SHARED:
            return self._numpy.dtype(_SHARED[dtype])
        if dtype not in _SMALL_FLOATS:
            raise _unknown(dtype, name, "numpy")
        try:
            import ml_dtypes
        except ImportError:
            raise _unknown(dtype, name, "numpy without the package ml_dtypes") from None
        found = getattr(ml_dtypes, _SMALL_FLOATS[dtype], None)
        if found is None:
            raise _unknown(dtype, name, f"ml_dtypes {ml_dtypes.__version__}")
        return self._numpy.dtype(found)

    def dtype_name(self, dtype: Any) -> str | None:
        """The name that headers use for a dtype of numpy. None if there is none."""
        if not dtype.isnative:
            return None
        words = {**_SHARED, **_SMALL_FLOATS, "BOOL": "bool"}
        return next((name for name, word in words.items() if dtype.name == word), None)

    def empty(self, dtype: str, shape: Sequence[int], name: str) -> tuple[Any, int]:
        wanted = self.dtype(dtype, name)
        try:
            made = self._numpy.empty(tuple(shape), dtype=wanted)
        except ValueError as e:
            raise _too_large("numpy", shape, name, e) from None
        return made, made.__array_interface__["data"][0]

    def maker(self, dtype: str) -> None:
        return None

    def area(self, length: int) -> tuple[Any, int, int]:
        made = self._numpy.empty(length, dtype=self._numpy.uint8)
        return made, made.__array_interface__["data"][0], length

    def views(self, areas: Sequence[tuple[Any, int]], placed: Sequence[Placed]) -> dict[str, Any]:
        tensors = {}
        for name, region, offset, nbytes, dtype, shape in placed:
            if nbytes == 0:
                tensors[name] = self.empty(dtype, shape, name)[0]
                continue
            area, address = areas[region]
            wanted = self.dtype(dtype, name)
            try:
                tensors[name] = self._numpy.ndarray(shape, wanted, area, -address % PAGE + offset)
            except ValueError as e:
                raise _too_large("numpy", shape, name, e) from None
        return tensors

    def of_bytes(self, data: bytearray, dtype: str, shape: Sequence[int], name: str) -> Any:
        """An array that uses the memory of `data`."""
        return self._numpy.ndarray(tuple(shape), self.dtype(dtype, name), data)

    def stepped(self, tensor: Any, steps: tuple[slice, ...]) -> Any:
        return self._numpy.ascontiguousarray(tensor[steps])


class DLPack:
    """Tensors of this package, for frameworks that accept DLPack."""

    name = "dlpack"
    indexes_itself = False
    finish: Any = None

    def __init__(self, gpu: int | None) -> None:
        _only_cpu(self.name, gpu)

    def stream(self) -> None:
        return None

    def over(self, area: Area) -> Any:
        return area

    def mode(self) -> object:
        return None

    def dtype(self, dtype: str, name: str) -> str:
        return dtype

    def check(self, dtype: str, shape: Sequence[int], name: str) -> None:
        """Accepts every tensor."""

    def empty(self, dtype: str, shape: Sequence[int], name: str) -> tuple[Any, int]:
        made = Tensor.empty(dtype, list(shape))
        return made, made.data_ptr

    def maker(self, dtype: str) -> None:
        return None

    def area(self, length: int) -> tuple[Any, int, int]:
        made = Area(length)
        return made, 0, length

    def views(self, areas: Sequence[tuple[Any, int]], placed: Sequence[Placed]) -> dict[str, Any]:
        return {
            name: Tensor(areas[region][0], offset, nbytes, dtype, list(shape))
            for name, region, offset, nbytes, dtype, shape in placed
        }

    def stepped(self, tensor: Any, steps: tuple[slice, ...]) -> Any:
        raise error('framework="dlpack" has no slices with steps: take one without, and step over it')


class FromNumpy(Numpy):
    """Tensors that another framework makes of numpy arrays. Some frameworks do this without a copy."""

    made_by: tuple[str, str]
    """The module, and its function that makes a tensor of an array."""

    def __init__(self, gpu: int | None) -> None:
        super().__init__(gpu)
        module, function = self.made_by
        self.finish = getattr(importlib.import_module(module), function)

    def is_array(self, tensor: Any) -> bool:
        """Whether `tensor` is still a numpy array, which `finish` has to make a tensor of."""
        return isinstance(tensor, self._numpy.ndarray)

    def stepped(self, tensor: Any, steps: tuple[slice, ...]) -> Any:
        return tensor[steps]


class Jax(FromNumpy):
    """Arrays of jax."""

    name = "flax"
    made_by = ("jax.numpy", "asarray")


class TensorFlow(FromNumpy):
    """Tensors of tensorflow."""

    name = "tensorflow"
    made_by = ("tensorflow", "convert_to_tensor")


class Mlx(FromNumpy):
    """Arrays of mlx."""

    name = "mlx"
    made_by = ("mlx.core", "array")


class Paddle(FromNumpy):
    """Tensors of paddle."""

    name = "paddle"
    made_by = ("paddle", "to_tensor")
    # Dtypes that numpy has only by ml_dtypes, each with an integer dtype of the same width, in which paddle takes the
    # bytes.
    _BY_WIDTH = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
    # Dtypes that paddle lacks. It would take an array of unsigned 16-bit integers for bfloat16.
    _LACKS = ("U16", "U32", "U64", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0")

    def __init__(self, gpu: int | None) -> None:
        super().__init__(gpu)
        self._to_tensor, self.finish = self.finish, self._made_of

    def _find(self, dtype: str, name: str) -> Any:
        if dtype in self._LACKS:
            raise _unknown(dtype, name, "paddle")
        return super()._find(dtype, name)

    def _made_of(self, array: Any) -> Any:
        integers = self._BY_WIDTH.get(array.dtype.name)
        if integers is None:
            return self._to_tensor(array)
        return self._to_tensor(array.view(integers)).view(array.dtype.name)


_NAMES = {
    "pt": Torch,
    "torch": Torch,
    "pytorch": Torch,
    "np": Numpy,
    "numpy": Numpy,
    "dlpack": DLPack,
}
_FROM_NUMPY = {
    "flax": Jax,
    "jax": Jax,
    "mlx": Mlx,
    "paddle": Paddle,
    "tensorflow": TensorFlow,
    "tf": TensorFlow,
}
_made: dict[tuple[type, int | None], Any] = {}


WIDTHS = {
    **dict.fromkeys(("F64", "U64", "I64", "C64"), 8),
    **dict.fromkeys(("F32", "U32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16", "U16", "I16"), 2),
}
"""Bytes of an element, for dtypes whose elements have more than one byte."""


def is_known(framework: object) -> bool:
    """Whether `patched()` opens files for this framework with tensorfs. For other frameworks safetensors opens them."""
    return framework in _NAMES


def is_from_numpy(framework: object) -> bool:
    """Whether the tensors of this framework are made of numpy arrays."""
    return framework in _FROM_NUMPY


def find(framework: object, gpu: int | None = None) -> Any:
    """The framework with this name, for tensors on the CPU or on a GPU."""
    if not isinstance(framework, str):
        raise TypeError(f"framework has to be a str, not {type(framework).__name__}")
    cls = _NAMES.get(framework) or _FROM_NUMPY.get(framework)
    if cls is None:
        raise error(f"framework {framework} is invalid")
    if (cls, gpu) not in _made:
        _made[cls, gpu] = cls(gpu)
    return _made[cls, gpu]


def _only_cpu(name: str, gpu: int | None) -> None:
    if gpu is not None:
        raise error(f'framework {name} has no tensors on cuda:{gpu}: open with framework="pt", or load to cpu')


def _buffer(area: Area) -> Any:
    """An object with the bytes of `area`, which it keeps alive."""
    import ctypes

    made = (ctypes.c_ubyte * len(area)).from_address(area.address)
    made._owner = area  # type: ignore[attr-defined]
    return made


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _packed(dtype: str, shape: Sequence[int], name: str) -> tuple[int, ...]:
    """The shape of a tensor in torch, which stores two F4 elements in one of its own."""
    if dtype != PACKED:
        return tuple(shape)
    if not shape or shape[-1] % 2:
        raise error(
            f"f4_x2 dtype requires that the last dim be divisible by 2 in torch: got {list(shape)} for tensor {name}",
            tensor=name,
        )
    return (*shape[:-1], shape[-1] // 2)


def _too_large(where: str, shape: Sequence[int], name: str, why: object) -> Exception:
    return error(f'tensor `{name}`: {where} has no tensor of shape {list(shape)}: {why}; open with framework="dlpack"', tensor=name)


def _unknown(dtype: str, name: str, where: str) -> Exception:
    return error(f"tensor `{name}`: {where} has no dtype for {dtype}", "unknown_dtype", cls=DtypeError, tensor=name)

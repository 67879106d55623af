"""Tensors of torch that are read when they are used. Only the used part of a tensor is read."""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from .. import _frameworks
from .._open import TensorMetadata, safe_open

_aten = torch.ops.aten


class Part(NamedTuple):
    """A part of a stored tensor, as a tensor of its own."""

    box: tuple[tuple[int, int], ...]
    """First index and end in each dimension of the stored tensor."""
    dims: tuple[int | None, ...]
    """For each dimension of this tensor: the dimension of the stored tensor that it is, or None for an added dimension
    of size 1. In all other dimensions of the stored tensor, the box has one index."""
    strides: tuple[int, ...]
    """The strides that torch gives to this view of the stored tensor, in elements."""
    offset: int

    def shape(self) -> tuple[int, ...]:
        return tuple(1 if dim is None else self.box[dim][1] - self.box[dim][0] for dim in self.dims)

    def narrowed(self, dim: int, start: int, stop: int) -> Part | None:
        """The part with the indices from `start` to `stop` in `dim`. None if an added dimension would lose its only
        index."""
        stored = self.dims[dim]
        if stored is None:
            return self if (start, stop) == (0, 1) else None
        low = self.box[stored][0]
        box = (*self.box[:stored], (low + start, low + stop), *self.box[stored + 1 :])
        return self._replace(box=box, offset=self.offset + start * self.strides[dim])

    def selected(self, dim: int, index: int) -> Part | None:
        part = self.narrowed(dim, index, index + 1)
        return part and part._replace(
            dims=part.dims[:dim] + part.dims[dim + 1 :], strides=part.strides[:dim] + part.strides[dim + 1 :]
        )

    def unsqueezed(self, dim: int) -> Part:
        stride = self.shape()[dim] * self.strides[dim] if dim < len(self.dims) else 1
        return self._replace(
            dims=(*self.dims[:dim], None, *self.dims[dim:]), strides=(*self.strides[:dim], stride, *self.strides[dim:])
        )

    def permuted(self, order: list[int]) -> Part:
        dims, strides = tuple(self.dims[dim] for dim in order), tuple(self.strides[dim] for dim in order)
        return self._replace(dims=dims, strides=strides)


class LazyTensor(torch.Tensor):
    """A tensor of a checkpoint that is read when its values are needed. Its parts and views are lazy too. None of them
    can be written to, so that a part which is read later has the bytes of the checkpoint."""

    _found: Any
    """The stored tensor, for indexing."""
    _part: Part | None
    """None for a view that is no part of the stored tensor. Such a view has its values from the beginning."""
    _value: torch.Tensor | None

    _stored_len: int
    """The length of the stored tensor in bytes."""

    @staticmethod
    def _of_part(found: Any, part: Part, dtype: torch.dtype, device: str, stored_len: int) -> LazyTensor:
        made = _wrapper(part.shape(), part.strides, part.offset, dtype, device)
        made._found, made._part, made._value, made._stored_len = found, part, None, stored_len
        return made

    def _viewed(self, value: torch.Tensor, layout: torch.Tensor) -> LazyTensor:
        """A view of this tensor with these values. `layout` has its strides."""
        made = _wrapper(tuple(layout.shape), layout.stride(), layout.storage_offset(), value.dtype, str(value.device))
        made._found, made._part, made._value, made._stored_len = self._found, None, value, self._stored_len
        return made

    def _layout(self) -> torch.Tensor:
        """A tensor without values that has the shape and the strides of this one. Its memory has the length of the
        stored tensor."""
        memory = torch.empty(self._stored_len, dtype=torch.uint8, device="meta").untyped_storage()
        made = torch.empty(0, dtype=self.dtype, device="meta")
        return made.set_(memory, self.storage_offset(), self.shape, self.stride())

    def value(self) -> torch.Tensor:
        """An ordinary tensor with the values. The values are read only once."""
        if self._value is None:
            assert self._part is not None
            box, dims = self._part[:2]
            read = self._found[tuple(slice(low, high) for low, high in box)]
            for dim in sorted(set(range(len(box))) - set(dims), reverse=True):
                assert read.shape[dim] == 1, (box, dims)
                read = read.select(dim, 0)
            kept = [dim for dim in dims if dim is not None]
            read = read.permute([sorted(kept).index(dim) for dim in kept])
            self._value = read[tuple(None if dim is None else slice(None) for dim in dims)]
        return self._value

    def stored(self) -> torch.Tensor:
        """An ordinary tensor with the values, the strides and the offset of this one. Its memory holds the whole stored
        tensor, so the whole stored tensor is read."""
        value = self._value
        facts = None if value is None else (value.untyped_storage().nbytes(), value.storage_offset(), value.stride())
        if value is None or facts != (self._stored_len, self.storage_offset(), self.stride()):
            whole = self._found[...].contiguous()
            if whole.untyped_storage().nbytes() != self._stored_len:
                whole = whole.clone()
            made = torch.empty(0, dtype=self.dtype, device=whole.device)
            value = made.set_(whole.untyped_storage(), self.storage_offset(), self.shape, self.stride())
            self._value = value
        return value

    def part(self, part: Part | None) -> LazyTensor | None:
        """Another part of the same stored tensor."""
        return part and LazyTensor._of_part(self._found, part, self.dtype, str(self._on), self._stored_len)

    def parts(self, parts: list[Part | None]) -> list[LazyTensor | None] | None:
        """Other parts of the same stored tensor. None if any of them is None."""
        return None if None in parts else [self.part(part) for part in parts]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0]._on
        kwargs = kwargs or {}
        slicing = _SLICING.get(func)
        if slicing is not None and args[0]._part is not None:
            found = slicing(*args, **kwargs)
            if found is not None:
                return found
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and _has_lazy(value):
                raise RuntimeError(f"tensorfs: {func} writes to a weight of the checkpoint: load without the option lazy")
        if func.overloadpacket is _aten.set_:
            raise RuntimeError(f"tensorfs: {func} shares the memory of a weight of the checkpoint: load without the option lazy")
        plain = LazyTensor.stored if func.overloadpacket in _BY_STRIDES else LazyTensor.value
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if not is_view:
            return func(*tree_map_only(LazyTensor, plain, args), **tree_map_only(LazyTensor, plain, kwargs))
        # torch decides by the strides of this tensor whether the view is possible. The tensor with the values may have
        # other strides.
        layouts = func(*tree_map_only(LazyTensor, LazyTensor._layout, args), **kwargs)
        values = func(*tree_map_only(LazyTensor, plain, args), **kwargs)
        if isinstance(values, torch.Tensor) and (values.is_conj() or values.is_neg()):
            # This is a copy, because the memory of the stored tensor has other values.
            return values.resolve_conj().resolve_neg()
        if isinstance(values, torch.Tensor):
            return args[0]._viewed(values, layouts)
        return [args[0]._viewed(value, layout) for value, layout in zip(values, layouts)]

    # These methods do not pass through the dispatcher of torch.

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        # A copy, because an array can be written to.
        return self.value().clone().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.value().tolist()

    def data_ptr(self) -> int:
        value = self.value()
        return (value if value.stride() == self.stride() else self.stored()).data_ptr()

    def untyped_storage(self) -> Any:
        return self.stored().untyped_storage()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value().clone().__array__(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value().clone().__dlpack__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.value().clone()

    def __repr__(self, **_: Any) -> str:
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _wrapper(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dtype: torch.dtype, device: str
) -> LazyTensor:
    # For torch, the wrapper itself is on the device "meta". So torch refuses `parameter.data = lazy`, which would leave
    # a parameter without memory.
    made: LazyTensor = torch.Tensor._make_wrapper_subclass(
        LazyTensor, shape, strides=strides, storage_offset=offset, dtype=dtype, device="meta", dispatch_device=True
    )
    made._on = torch.device(device)
    return made


def _has_lazy(value: Any) -> bool:
    several = value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(one, LazyTensor) for one in several)


def lazy_tensor(opened: safe_open, name: str, facts: TensorMetadata, device: str) -> LazyTensor | None:
    """A tensor that is read later. None if torch has no such elements."""
    dtype = _frameworks._TORCH.get(facts.dtype)
    if facts.dtype == _frameworks.PACKED or dtype is None or not hasattr(torch, dtype):
        return None
    strides, stride = [], 1
    for size in reversed(facts.shape):
        strides.append(stride)
        stride *= max(size, 1)
    box, dims = tuple((0, size) for size in facts.shape), tuple(range(len(facts.shape)))
    part, made = Part(box, dims, tuple(reversed(strides)), 0), getattr(torch, dtype)
    stored_len = made.itemsize * math.prod(facts.shape)
    return LazyTensor._of_part(opened.get_slice(name), part, made, device, stored_len)


def _slice(of: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    if step != 1:
        return None
    size = of.shape[dim]
    low, high, _ = slice(start, end).indices(size)
    return of.part(of._part.narrowed(dim % of.dim(), low, max(low, high)))


def _select(of: LazyTensor, dim: int, index: int) -> Any:
    if not -of.shape[dim] <= index < of.shape[dim]:
        return None
    return of.part(of._part.selected(dim % of.dim(), index % of.shape[dim]))


def _split(of: LazyTensor, length: int, dim: int = 0) -> Any:
    if length < 1:
        return None
    size = of.shape[dim]
    bounds = [(low, min(low + length, size)) for low in range(0, size, length)] or [(0, 0)]
    return of.parts([of._part.narrowed(dim % of.dim(), low, high) for low, high in bounds])


def _split_sizes(of: LazyTensor, lengths: list[int], dim: int = 0) -> Any:
    if sum(lengths) != of.shape[dim] or min(lengths, default=0) < 0:
        return None
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    return of.parts([of._part.narrowed(dim % of.dim(), low, low + length) for low, length in zip(starts, lengths)])


def _unbind(of: LazyTensor, dim: int = 0) -> Any:
    return of.parts([of._part.selected(dim % of.dim(), index) for index in range(of.shape[dim])])


def _unsqueeze(of: LazyTensor, dim: int) -> Any:
    return of.part(of._part.unsqueezed(dim % (of.dim() + 1))) if -of.dim() <= dim + 1 <= of.dim() + 1 else None


def _transpose(of: LazyTensor, one: int, other: int) -> Any:
    if not all(-of.dim() <= dim < of.dim() for dim in (one, other)):
        return None
    order = list(range(of.dim()))
    order[one], order[other] = order[other], order[one]
    return of.part(of._part.permuted(order))


def _permute(of: LazyTensor, order: list[int]) -> Any:
    if sorted(dim + of.dim() if dim < 0 else dim for dim in order) != list(range(of.dim())):
        return None
    return of.part(of._part.permuted([dim % of.dim() for dim in order]))


def _same(of: LazyTensor) -> Any:
    return of.part(of._part) if of._value is None else None


_SLICING: dict[Any, Callable[..., Any]] = {
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_sizes,
    _aten.unbind.int: _unbind,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.transpose.int: _transpose,
    _aten.t.default: lambda of: _transpose(of, 0, 1) if of.dim() == 2 else None,
    _aten.permute.default: _permute,
    _aten.detach.default: _same,
    _aten.alias.default: _same,
}
"""Operations whose result is another part of the same tensor. Their functions return None if the result is no such
part, or if torch has to judge the arguments."""

_BY_STRIDES = {
    _aten.as_strided,
    _aten.as_strided_copy,
    _aten.as_strided_scatter,
    _aten._reshape_alias,
    _aten._reshape_alias_copy,
    _aten._unsafe_view,
}
"""Operations whose result depends not only on the values, but also on the strides, or on memory around the tensor."""

"""Tensors of torch, wrapped with their device and their dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

from ... import _frameworks
from .st_types import Device, DeviceType, DType

_BY_BYTES = (DType.F8_E8M0, DType.F4)
"""Dtypes whose tensors torch cannot join, so that their bytes are joined."""


@dataclass
class TensorBase:
    """A tensor of torch."""

    device: Device
    dtype: DType
    real_tensor: Any

    def get_raw(self) -> Any:
        """The tensor itself."""
        return self.real_tensor

    def get_shape(self) -> list[int]:
        """The shape in elements as a header counts them."""
        shape = list(self.real_tensor.shape)
        if self.dtype == DType.F4:
            shape[-1] *= 2
        return shape

    def get_nbytes(self) -> int:
        """Its length in bytes."""
        return int(self.real_tensor.nbytes)

    def copy_to_buffer(self, buf: memoryview) -> None:
        """Copies the bytes of the tensor to the start of a buffer."""
        import torch

        if self.real_tensor.numel():
            flat = self.real_tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            torch.frombuffer(buf, dtype=torch.uint8, count=flat.numel()).copy_(flat)

    def data_ptr(self) -> int:
        """The address of its first element."""
        return int(self.real_tensor.data_ptr())

    def to(self, device: Device | None = None, dtype: DType = DType.AUTO) -> TensorBase:
        """The same elements on another device, or with another dtype. If both are unchanged, this object itself."""
        device = self.device if device is None else device
        dtype = self.dtype if dtype == DType.AUTO else dtype
        if (device, dtype) == (self.device, self.dtype):
            return self
        where = None if device == self.device else device.as_str()
        return TensorBase(device, dtype, self.real_tensor.to(device=where, dtype=torch_dtype(dtype)))

    def contiguous(self) -> TensorBase:
        """The same elements, contiguous in memory."""
        return self._with(self.real_tensor.contiguous())

    def clone(self) -> TensorBase:
        """A copy with memory of its own."""
        return self._with(self.real_tensor.clone())

    def detach(self) -> TensorBase:
        """The same memory, without a history of gradients."""
        return self._with(self.real_tensor.detach())

    def reshape(self, shape: Sequence[int]) -> TensorBase:
        """The same elements in another shape."""
        return self._with(self.real_tensor.reshape(shape))

    def view(self, dtype: DType) -> TensorBase:
        """The same bytes as elements of another dtype."""
        return TensorBase(self.device, dtype, self.real_tensor.view(torch_dtype(dtype)))

    def __getitem__(self, index: Any) -> TensorBase:
        return self._with(self.real_tensor[index])

    def _with(self, tensor: Any) -> TensorBase:
        return TensorBase(self.device, self.dtype, tensor)


def torch_dtype(dtype: DType) -> Any:
    """The torch dtype for a dtype of a header."""
    return _frameworks.find("pt").dtype(dtype.value, "")


def wrapped(tensor: Any, dtype: str) -> TensorBase:
    """A tensor of torch, wrapped with the dtype that its header states."""
    return TensorBase(Device(DeviceType(tensor.device.type), tensor.device.index), DType(dtype), tensor)


def joined(tensors: Sequence[TensorBase], dim: int) -> TensorBase:
    """The tensors, joined one after the other in the dimension `dim`."""
    import torch

    first = tensors[0]
    raw = [tensor.real_tensor for tensor in tensors]
    if first.dtype in _BY_BYTES:
        made = torch.cat([one.view(torch.uint8) for one in raw], dim=dim).view(torch_dtype(first.dtype))
    else:
        made = torch.cat(raw, dim=dim)
    return TensorBase(first.device, first.dtype, made)

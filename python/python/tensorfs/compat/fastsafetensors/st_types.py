"""Devices and dtypes, with the names that fastsafetensors uses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DeviceType(Enum):
    """Kinds of devices."""

    CPU = "cpu"
    CUDA = "cuda"
    GPU = "gpu"


@dataclass(frozen=True)
class Device:
    """A device, with its number if it has one."""

    type: DeviceType = DeviceType.CPU
    index: int | None = None

    def as_str(self) -> str:
        """The device as torch names it."""
        return self.type.value if self.index is None else f"{self.type.value}:{self.index}"

    @classmethod
    def from_str(cls, s: str) -> Device:
        """The device that a text such as "cuda:0" names. Raises `ValueError` for any other text."""
        kind, colon, number = s.partition(":")
        if kind.lower() not in [known.value for known in DeviceType]:
            raise ValueError(f"device {s}: expected cpu, cuda or gpu, with a number or without")
        if colon and not number.isdecimal():
            raise ValueError(f"device {s}: {number!r} is no number of a device")
        return cls(DeviceType(kind.lower()), int(number) if colon else None)


class DType(Enum):
    """Dtypes, with the names that headers use. AUTO stands for the dtype in the file."""

    BOOL = "BOOL"
    I8 = "I8"
    I16 = "I16"
    I32 = "I32"
    I64 = "I64"
    U8 = "U8"
    U16 = "U16"
    U32 = "U32"
    U64 = "U64"
    F16 = "F16"
    F32 = "F32"
    F64 = "F64"
    BF16 = "BF16"
    C64 = "C64"
    F8_E5M2 = "F8_E5M2"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    F8_E4M3 = "F8_E4M3"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E8M0 = "F8_E8M0"
    F4 = "F4"
    AUTO = "AUTO"


DTYPE_SIZES = {
    **dict.fromkeys((DType.U64, DType.I64, DType.F64, DType.C64), 8),
    **dict.fromkeys((DType.U32, DType.I32, DType.F32), 4),
    **dict.fromkeys((DType.U16, DType.I16, DType.F16, DType.BF16), 2),
    **dict.fromkeys((DType.BOOL, DType.U8, DType.I8, DType.F8_E5M2, DType.F8_E5M2FNUZ), 1),
    **dict.fromkeys((DType.F8_E4M3, DType.F8_E4M3FNUZ, DType.F8_E8M0), 1),
    DType.F4: 0.5,
}
"""Bytes of an element."""

"""A second implementation of the cipher of encrypted tensorizer files, which is `crypto_secretbox` of NaCl."""

import struct

import numpy as np

_SIGMA = struct.unpack("<4I", b"expand 32-byte k")
_ROUNDS = (
    ((4, 0, 12, 7), (8, 4, 0, 9), (12, 8, 4, 13), (0, 12, 8, 18)),
    ((9, 5, 1, 7), (13, 9, 5, 9), (1, 13, 9, 13), (5, 1, 13, 18)),
    ((14, 10, 6, 7), (2, 14, 10, 9), (6, 2, 14, 13), (10, 6, 2, 18)),
    ((3, 15, 11, 7), (7, 3, 15, 9), (11, 7, 3, 13), (15, 11, 7, 18)),
    ((1, 0, 3, 7), (2, 1, 0, 9), (3, 2, 1, 13), (0, 3, 2, 18)),
    ((6, 5, 4, 7), (7, 6, 5, 9), (4, 7, 6, 13), (5, 4, 7, 18)),
    ((11, 10, 9, 7), (8, 11, 10, 9), (9, 8, 11, 13), (10, 9, 8, 18)),
    ((12, 15, 14, 7), (13, 12, 15, 9), (14, 13, 12, 13), (15, 14, 13, 18)),
)


def _state(key, inputs):
    """The initial state of the cipher for a key of 32 bytes and four input words. The words may be arrays."""
    key = struct.unpack("<8I", key)
    words = [_SIGMA[0], *key[:4], _SIGMA[1], *inputs, _SIGMA[2], *key[4:], _SIGMA[3]]
    return [np.asarray(word, dtype=np.uint32) for word in words]


def _mixed(state):
    words = [word.copy() for word in np.broadcast_arrays(*state)]
    for _ in range(10):
        for quarter in _ROUNDS:
            for target, first, second, shift in quarter:
                total = words[first] + words[second]
                words[target] ^= (total << np.uint32(shift)) | (total >> np.uint32(32 - shift))
    return words


def _stream(key, nonce, length):
    """The first bytes of the key stream."""
    with np.errstate(over="ignore"):
        words = _mixed(_state(key, struct.unpack("<4I", nonce[:16])))
        subkey = struct.pack("<8I", *(int(words[index]) for index in (0, 5, 10, 15, 6, 7, 8, 9)))
        blocks = np.arange(-(-length // 64), dtype=np.uint64)
        low, high = (blocks & np.uint64(0xFFFFFFFF)).astype(np.uint32), (blocks >> np.uint64(32)).astype(np.uint32)
        state = _state(subkey, [*struct.unpack("<2I", nonce[16:]), low, high])
        words = [a + b for a, b in zip(_mixed(state), state)]
    return np.stack(np.broadcast_arrays(*words), axis=1).astype("<u4").tobytes()[:length]


def _poly1305(key, data):
    r = int.from_bytes(key[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
    total = 0
    for start in range(0, len(data), 16):
        total = (total + int.from_bytes(data[start : start + 16] + b"\1", "little")) * r % (2**130 - 5)
    return ((total + int.from_bytes(key[16:], "little")) % 2**128).to_bytes(16, "little")


def seal(key, nonce, data):
    """The MAC and the encrypted bytes of `data`."""
    stream = _stream(key, nonce, 32 + len(data))
    sealed = np.bitwise_xor(np.frombuffer(data, np.uint8), np.frombuffer(stream, np.uint8)[32:]).tobytes()
    return _poly1305(stream[:32], sealed), sealed


def encrypt(key, data, piece=2 << 20, nonce=bytes(range(24))):
    """The encryption section of a tensor with its length, and the data of the tensor in encrypted pieces."""
    macs, sealed = [], []
    for index, start in enumerate(range(0, len(data), piece)):
        number = (int.from_bytes(nonce, "little") + index) % 2**192
        mac, part = seal(key, number.to_bytes(24, "little"), data[start : start + piece])
        macs.append(mac)
        sealed.append(part)
    part = struct.pack("<HQ", 2, piece) + nonce + struct.pack("<Q", len(macs)) + b"".join(macs)
    section = struct.pack("<HQ", 1, len(part)) + part if data else struct.pack("<H", 0)
    return struct.pack("<Q", len(section)) + section, b"".join(sealed)

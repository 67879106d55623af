"""Random changes of checkpoints with pickles. The changed checkpoint depends only on its number and on a seed."""

import io
import pickletools
import random
import struct
import zipfile

SIZE_MAX = 1_000_000
NUMBERS = (0, 1, 2, 3, 7, 8, 64, 255, 256, 65535, 65536, 2**31 - 1)
TEXTS = (
    b"cpu", b"meta", b"storage", b"module", b"0", b"1", b"..", b"/etc/passwd", b"__metadata__", b"weight", b"model",
    b"state_dict", b"optimizer", b"", b"\xff\xfe", b"a.b", b"\x00",
)
GLOBALS = (
    (b"os", b"system"), (b"builtins", b"eval"), (b"torch", b"load"), (b"torch", b"FloatStorage"), (b"torch", b"HalfStorage"),
    (b"torch", b"LongStorage"), (b"torch", b"ByteStorage"), (b"torch", b"BoolStorage"), (b"torch", b"QInt8Storage"),
    (b"torch.storage", b"UntypedStorage"), (b"torch._utils", b"_rebuild_tensor_v2"), (b"torch._utils", b"_rebuild_tensor"),
    (b"torch._utils", b"_rebuild_tensor_v3"), (b"torch._utils", b"_rebuild_parameter"), (b"torch._tensor", b"_rebuild_from_type_v2"),
    (b"torch", b"Size"), (b"torch", b"float32"), (b"torch", b"bfloat16"), (b"torch", b"float8_e4m3fn"), (b"torch", b"device"),
    (b"collections", b"OrderedDict"), (b"collections", b"Counter"), (b"builtins", b"set"), (b"argparse", b"Namespace"),
    (b"no.such.module", b"Thing"), (b"torch.distributed.tensor.placement_types", b"Replicate"),
    (b"torch.distributed.tensor.placement_types", b"Shard"), (b"torch.distributed.tensor.placement_types", b"Partial"),
)  # fmt: skip


def change_folder(chosen: random.Random, files: list) -> str:
    """Removes a file, or replaces a file by another one. Returns a description of the change."""
    one, other = chosen.choice(files), chosen.choice(files)
    way = chosen.choice(("remove", "copy", "swap"))
    first, second = one.read_bytes(), other.read_bytes()
    if way == "remove":
        one.unlink()
    else:
        one.write_bytes(second)
        if way == "swap":
            other.write_bytes(first)
    return f"{way} {one.name} {other.name}"


def change_file(chosen: random.Random, path, others: list) -> str:
    """Changes the bytes of a file. `others` are files from which bytes are taken. Returns a description of the
    change."""
    data = path.read_bytes()
    ways = [flip, flip, cut, splice]
    if data[:2] == b"PK":
        ways += [change_entries, change_directory] + 6 * [change_pickle_of_archive]
    elif data[:1] == b"\x80":
        ways += 6 * [change_pickle]
    way = chosen.choice(ways)
    path.write_bytes(way(chosen, data, others)[:SIZE_MAX])
    return f"{way.__name__} {path.name}"


def flip(chosen, data, others):
    changed = bytearray(data)
    for _ in range(chosen.choice((1, 1, 2, 8))):
        at = chosen.randrange(len(data))
        changed[at] = chosen.choice((changed[at] ^ (1 << chosen.randrange(8)), chosen.randrange(256), 0, 255))
    return bytes(changed)


def cut(chosen, data, others):
    start = chosen.randrange(len(data))
    if chosen.random() < 0.5:
        return data[:start]
    return data[:start] + data[start + chosen.choice((1, 2, 16, 64, 256)) :]


def splice(chosen, data, others):
    other = chosen.choice((data, chosen.choice(others).read_bytes()))
    start, length = chosen.randrange(len(other)), chosen.choice((1, 4, 30, 46, 200, 1000))
    at = chosen.randrange(len(data))
    replaced = length if chosen.random() < 0.5 else 0
    return data[:at] + other[start : start + length] + data[at + replaced :]


def entries_of(data):
    """Names and bytes of the entries of an archive, in their order."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        # The bytes are read without `ZipFile.read`, which checks CRCs: if torch writes no CRCs, they are 0.
        for info in archive.infolist():
            start = info.header_offset + 30 + sum(struct.unpack_from("<HH", data, info.header_offset + 26))
            yield info.filename, data[start : start + info.file_size]


def archive_of(entries, kind=zipfile.ZIP_STORED):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", kind) as archive:
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name), content, kind)
    return made.getvalue()


def change_entries(chosen, data, others):
    """Another archive, in which entries are missing, repeated, renamed, in another order, deflated, or very many."""
    entries = list(entries_of(data))
    one, other = chosen.randrange(len(entries)), chosen.randrange(len(entries))
    name, content = entries[one]
    way = chosen.randrange(9)
    if way == 0:
        del entries[one]
    elif way == 1:
        entries.append((name, chosen.choice((content, entries[other][1]))))
    elif way == 2:
        new_names = (entries[other][0], "other/" + name.split("/")[-1], "../" + name, name + "\0x", name.upper())
        entries[one] = (chosen.choice(new_names), content)
    elif way == 3:
        chosen.shuffle(entries)
    elif way == 4:
        entries[one], entries[other] = (name, entries[other][1]), (entries[other][0], content)
    elif way == 5:
        entries[one] = (name, content[: chosen.randrange(len(content) + 1)])
    elif way == 6:
        entries[one] = (name, content + bytes(chosen.choice((1, 4, 64, 100_000))))
    elif way == 7:
        return archive_of(entries, zipfile.ZIP_DEFLATED)
    else:
        entries += [(f"{name}{number}", b"") for number in range(chosen.choice((10, 8000)))]
    return archive_of(entries)


def change_directory(chosen, data, others):
    """Changes fields in the header of an entry, or in the records at the end of the archive."""
    magic = chosen.choice((b"PK\1\2", b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7"))
    places = [at for at in range(len(data)) if data.startswith(magic, at)]
    if not places:
        return flip(chosen, data, others)
    at = chosen.choice(places) + 4 + 2 * chosen.randrange(30)
    form = chosen.choice(("<H", "<I"))
    changed = bytearray(data) + bytes(64)
    old = struct.unpack_from(form, changed, at)[0]
    value = chosen.choice((old + 1, old - 1, old ^ 0xFF, *NUMBERS)) % (1 << (8 * struct.calcsize(form)))
    struct.pack_into(form, changed, at, value)
    return bytes(changed[: len(data)])


def change_pickle_of_archive(chosen, data, others):
    """The same archive with another pickle. If `data` is several archives in a row, one of them is changed."""
    ends = [at for at in range(len(data)) if data.startswith(b"PK\5\6", at)]
    if len(ends) > 1:
        # The archives are items of a distributed checkpoint. The pickle keeps its length, so that the offsets of the
        # other items stay right.
        start = chosen.choice([0, *[end + 22 for end in ends[:-1]]])
        at = data.find(b"\x80\x02", start)
        end = data.find(b"PK", at)
        if at < 0 or end < 0:
            return flip(chosen, data, others)
        changed = change_pickle(chosen, data[at:end], others)
        return data[:at] + changed[: end - at].ljust(end - at, b".") + data[end:]
    entries = list(entries_of(data))
    changed = [
        (name, change_pickle(chosen, content, others) if name.endswith("data.pkl") else content) for name, content in entries
    ]
    return archive_of(changed)


def change_pickle(chosen, data, others):
    """Another pickle, in which some operations are changed, missing, moved, or repeated very often."""
    ops = operations(data)
    for _ in range(chosen.choice((1, 1, 1, 2, 4))):
        at, to = chosen.randrange(len(ops)), chosen.randrange(len(ops))
        way = chosen.randrange(12)
        if way == 0:
            del ops[at]
        elif way == 1:
            ops.insert(at, ops[to])
        elif way == 2:
            ops[at], ops[to] = ops[to], ops[at]
        elif way == 3:
            ops[at] = bytes([chosen.choice(pickletools.opcodes).code.encode("latin-1")[0]]) + ops[at][1:]
        elif way == 4:
            some = b"".join(ops[at : at + chosen.choice((1, 3, 10, 40))])
            ops[at:at] = [some * min(chosen.choice((2, 100, 10**6)), (SIZE_MAX - len(data)) // len(some) + 1)]
        elif way < 8:
            ops = changed_at(chosen, ops, b"KMJ", other_number)
        elif way < 10:
            ops = changed_at(chosen, ops, b"X\x8cU", other_text)
        else:
            ops = changed_at(chosen, ops, b"c", other_global)
        if not ops:
            break
    return b"".join(ops)


def operations(data):
    """The operations of a pickle, each as bytes. The last item has the bytes that are no operation."""
    places = []
    try:
        places.extend(place for _, _, place in pickletools.genops(data))
    except Exception:  # Any part of a changed pickle may be wrong.
        pass
    places = [*places, len(data)] if places else [0, len(data)]
    return [data[a:b] for a, b in zip(places, places[1:])]


def changed_at(chosen, ops, codes, change):
    """The operations, in which one operation with one of `codes` is changed."""
    places = [at for at, op in enumerate(ops) if op[:1] and op[0] in codes]
    if not places:
        return ops
    at = chosen.choice(places)
    return ops[:at] + [change(chosen, ops, ops[at])] + ops[at + 1 :]


def other_number(chosen, ops, op):
    old = int.from_bytes(op[1:5], "little", signed=True)
    value = chosen.choice((old + 1, old - 1, old * 2, -old, *NUMBERS))
    if chosen.random() < 0.1:
        return b"\x8a\x08" + struct.pack("<q", chosen.choice((2**40, 2**62, -(2**62), 2**63 - 1)))
    return b"J" + struct.pack("<i", max(-(2**31), min(value, 2**31 - 1)))


def other_text(chosen, ops, op):
    texts = [other for other in ops if other[:1] == b"X"]
    if texts and chosen.random() < 0.5:
        return chosen.choice(texts)
    text = chosen.choice(TEXTS)
    return b"X" + struct.pack("<I", len(text)) + text


def other_global(chosen, ops, op):
    names = [other for other in ops if other[:1] == b"c"]
    if chosen.random() < 0.3:
        return chosen.choice(names)
    return b"c%s\n%s\n" % chosen.choice(GLOBALS)

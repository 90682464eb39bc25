"""Damage to bytes and values, chosen by a `random.Random`: a case is a seed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from random import Random
from typing import Any

# Numbers at which programs fail: around zero, the widths of integers, and sizes beyond any memory.
_NUMBERS = (0, 1, 2, 7, 255, 256, 32_767, 32_768, 65_535, 65_536, 100_000, 2**31 - 1, 2**31, 2**32 - 1)
_MOST_BYTES = 1 << 20
"""Upper bound of the result in bytes: more only makes cases slow."""

_ODD_NUMBERS: tuple[float | None, ...] = (
    *(-1, 0, 1, 2**31, 2**53, 2**64, -(2**63), 10**400, 10**5000, 0.5, 2.5, -0.0, 1e308, 5e-324),
    *(float("nan"), float("inf"), -float("inf"), True, False, None),
)

NAMES = (
    b"1.jpg",
    b"\xff\xfe.jpg",  # not UTF-8
    b"a\nb.jpg",
    b"a\rb\x1b[2J.jpg",
    b"-rf.jpg",
    b"..jpg",
    b"...",
    b".jpg",
    b"x" * 251 + b".jpg",
    "é\u202egpj.png".encode(),
    b"%s%n{0}.jpg",
    b"a;b|c&d$(e)`f`.jpg",
    b" .jpg ",
    b"\\\\host\\share.jpg",
    b"s3:__bucket.png",
)
"""Legal names of files and folders that often break programs."""


def damaged(chance: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Damage bytes in one to six ways."""
    result = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        _damage(chance, result, others)
    return bytes(result[:_MOST_BYTES])


def _damage(chance: Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = _somewhere(chance, data)
    kind = chance.randrange(9)
    if not data or kind == 0:
        data[at:at] = chance.randbytes(chance.randrange(1, 64))
    elif kind == 1:
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 2:
        data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xD8, 0xD9, 0xDA, 0xFF))
    elif kind == 3:
        width = chance.choice((1, 2, 4, 8))
        number = chance.choice(_NUMBERS) & (1 << 8 * width) - 1
        data[at : at + width] = number.to_bytes(width, chance.choice(("big", "little")))
    elif kind == 4:
        del data[at:]
    elif kind == 5:
        del data[at : at + chance.randrange(1, 200)]
    elif kind == 6:
        piece = bytes(data[at : at + chance.randrange(1, 200)])
        data[at:at] = piece * chance.choice((1, 2, 100, 10_000 // len(piece)))
    elif kind == 7 and others:
        other = chance.choice(others)
        data[at:] = other[_somewhere(chance, other) :]
    else:
        data[at : at + 16] = chance.randbytes(16)


def _somewhere(chance: Random, data: bytes | bytearray) -> int:
    """Choose an offset, every other time in the probable header."""
    return chance.randrange(min(len(data), chance.choice((40, 700, 1 << 30)))) if data else 0


def sealed_png(data: bytes) -> bytes:
    """Repair the checksums of a PNG, as an attacker would."""
    result, at = bytearray(data), 8
    while at + 12 <= len(result):
        (length,) = struct.unpack_from(">I", result, at)
        if at + 12 + length > len(result):
            break
        struct.pack_into(">I", result, at + 8 + length, zlib.crc32(result[at + 4 : at + 8 + length]))
        at += 12 + length
    return bytes(result)


def odd_value(chance: Random, depth: int = 0) -> Any:
    """Make an unexpected value."""
    kind = chance.randrange(16 if depth < 3 else 12)
    if kind < 8:
        return chance.choice(_ODD_NUMBERS)
    if kind < 12:
        texts = ("", "1", "a\nb", "\ud800", "x" * 1000, "\0", "1e999 GB", "9" * 500, "../..", "é")
        return chance.choice((*texts, b"\xff", chance.randbytes(8)))
    if kind == 12:
        return {
            chance.choice(("", "x", "version", "\ud800", "size")): odd_value(chance, depth + 1)
            for _ in range(chance.randrange(4))
        }
    if kind == 13:
        return tuple(odd_value(chance, depth + 1) for _ in range(chance.randrange(4)))
    if kind == 14:
        nested: Any = []
        for _ in range(chance.choice((5, 150, 5000))):
            nested = [nested]
        return nested
    return [odd_value(chance, depth + 1) for _ in range(chance.randrange(4))]


def changed(chance: Random, value: Any) -> Any:
    """Change one position in nested dicts and lists: replace, remove or add a value."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(list(value))
        kind = chance.randrange(8)
        if kind == 0:
            return {name: inner for name, inner in value.items() if name != key}
        if kind == 1:
            return {**value, chance.choice(("", "x", 3, "version")): odd_value(chance)}
        return {**value, key: changed(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.8:
        index = chance.randrange(len(value))
        return [*value[:index], changed(chance, value[index]), *value[index + 1 :]]
    return odd_value(chance)

"""CRC-32C (Castagnoli) over an address range, with the CPU's instruction.

Three interleaved streams hide the latency of the instruction (one result per cycle instead of one
in three). Their registers are combined by tables that advance a register over a known number of
zero bytes. x86-64 (SSE4.2) and aarch64 (the crc extension, part of every ARMv8.1) have the
instruction; other machines use eight table lookups per word.

A register is the state between two bytes, without the inversions at both ends.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from logmirror.wire.kernels_address import inlined, kernel, load_i64, load_u8, shift_right

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

_POLYNOMIAL: Final = 0x82F63B78
"""CRC-32C, reflected."""

_MASK: Final = 0xFFFFFFFF
_LONG: Final = 8192
_SHORT: Final = 256
"""Bytes of one of the three streams, for large and for small inputs."""


def _times(matrix: list[int], vector: int) -> int:
    """Multiply a 32x32 bit matrix, given as columns, by a bit vector."""
    total = 0
    for column in matrix:
        if vector & 1:
            total ^= column
        vector >>= 1
    return total


def square(matrix: list[int]) -> list[int]:
    """The operator applied twice."""
    return [_times(matrix, column) for column in matrix]


def one_zero_byte() -> list[int]:
    """The operator that advances a register over one zero byte."""
    one_zero_bit = [_POLYNOMIAL, *(1 << i for i in range(31))]
    return square(square(square(one_zero_bit)))


def byte_tables(operator: list[int]) -> npt.NDArray[np.int64]:
    """An operator as int64[4, 256]: one look-up for each byte of the register."""
    return np.array(
        [[_times(operator, value << (8 * k)) for value in range(256)] for k in range(4)], np.int64
    )


def _zero_bytes(count: int) -> npt.NDArray[np.int64]:
    """Tables that advance a register over `count` zero bytes, a power of two."""
    operator = one_zero_byte()
    while count > 1:
        operator = square(operator)
        count >>= 1
    return byte_tables(operator)


def _word_tables() -> npt.NDArray[np.int64]:
    """int64[8, 256]: the register after byte value v and k zero bytes behind it."""
    operator, rows = one_zero_byte(), []
    row = [_times(operator, value) for value in range(256)]
    for _ in range(8):
        rows.append(row)
        row = [_times(operator, value) for value in row]
    return np.array(rows, np.int64)


_AFTER_LONG: Final = _zero_bytes(_LONG)
_AFTER_SHORT: Final = _zero_bytes(_SHORT)
_WORD: Final = _word_tables()


@inlined
def step_by_table(register: int, word: int) -> int:
    """Advance a register over 8 bytes, by look-ups: for machines without the instruction."""
    mixed = register ^ word
    total = 0
    for k in range(8):
        total ^= _WORD[7 - k, shift_right(mixed, 8 * k) & 255]
    return total


def _step_by_instruction(name: str, *, narrow_register: bool) -> Callable[[int, int], int]:
    """Advance a register over 8 bytes by LLVM's intrinsic of that name."""
    wide, narrow = ir.IntType(64), ir.IntType(32)
    register_type = narrow if narrow_register else wide

    @intrinsic
    def step(_typing_context: Any, _register: Any, _word: Any) -> Any:  # noqa: ANN401  # numba's own types
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401  # LLVM values
            kind = ir.FunctionType(register_type, [register_type, wide])
            function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]  # numba
                builder.module, kind, name
            )
            if not narrow_register:
                return builder.call(function, args)
            register = builder.call(function, [builder.trunc(args[0], narrow), args[1]])
            return builder.zext(register, wide)

        return types.int64(types.int64, types.int64), generate

    return cast("Callable[[int, int], int]", step)


INSTRUCTIONS: Final = {
    "x86_64": ("llvm.x86.sse42.crc32.64.64", False, "crc32"),
    "amd64": ("llvm.x86.sse42.crc32.64.64", False, "crc32"),
    "aarch64": ("llvm.aarch64.crc32cx", True, "crc"),
    "arm64": ("llvm.aarch64.crc32cx", True, "crc"),
}
"""Machine, as Python names it: LLVM's intrinsic, whether its register is 32 bits wide, and the
processor feature without which LLVM would end the process."""


def best_step(machine: str, features: Mapping[str, bool]) -> Callable[[int, int], int]:
    """The fastest step that a machine with these processor features can take."""
    name, narrow_register, feature = INSTRUCTIONS.get(machine.lower(), ("", False, ""))
    if not features.get(feature):
        return step_by_table
    return _step_by_instruction(name, narrow_register=narrow_register)


step = best_step(platform.machine(), get_host_cpu_features())
"""Advance a register over 8 bytes: step(register, little-endian word)."""


@inlined
def step_byte(register: int, byte: int) -> int:
    """Advance a register over one byte."""
    after: int = (register >> 8) ^ _WORD[0, (register ^ byte) & 255]
    return after


@inlined
def advance(tables: Any, register: int) -> int:  # noqa: ANN401  # numba types an array argument
    """Apply an operator made by `byte_tables`."""
    joined: int = (
        tables[0, register & 255]
        ^ tables[1, (register >> 8) & 255]
        ^ tables[2, (register >> 16) & 255]
        ^ tables[3, (register >> 24) & 255]
    )
    return joined


@inlined
def _three_streams(register: int, position: int, length: int) -> tuple[int, int, int]:
    """Advance over `length` bytes thrice: side by side, not yet joined."""
    second = 0
    third = 0
    end = position + length
    while position < end:
        register = step(register, load_i64(position))
        second = step(second, load_i64(position + length))
        third = step(third, load_i64(position + 2 * length))
        position += 8
    return register, second, third


@inlined
def crc32c(position: int, size: int) -> int:
    """CRC-32C of `size` bytes at address `position`, for use inside kernels; 0..2^32-1."""
    register = _MASK
    while size >= 3 * _LONG:
        register, second, third = _three_streams(register, position, _LONG)
        register = advance(_AFTER_LONG, register) ^ second
        register = advance(_AFTER_LONG, register) ^ third
        position += 3 * _LONG
        size -= 3 * _LONG
    while size >= 3 * _SHORT:
        register, second, third = _three_streams(register, position, _SHORT)
        register = advance(_AFTER_SHORT, register) ^ second
        register = advance(_AFTER_SHORT, register) ^ third
        position += 3 * _SHORT
        size -= 3 * _SHORT
    while size >= 8:  # noqa: PLR2004  # bytes of a word
        register = step(register, load_i64(position))
        position += 8
        size -= 8
    while size > 0:
        register = step_byte(register, load_u8(position))
        position += 1
        size -= 1
    return register ^ _MASK


@kernel("int64(int64,int64)")
def crc32c_at(position: int, size: int) -> int:
    """CRC-32C of `size` bytes at address `position`; 0..2^32-1."""
    return crc32c(position, size)

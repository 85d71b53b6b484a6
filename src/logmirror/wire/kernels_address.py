"""Loads, stores and copies on raw addresses, from which all kernels are built.

Inside a compiled kernel a numpy array costs reference counts, negative-index checks and reloads as
soon as the control flow is not trivial (measured: 12 instead of 50 million records a second for one
decode loop). Kernels therefore take addresses and touch memory through the functions below. Every
value is a signed 64-bit integer, so that a kernel reads like plain Python and the type checker sees
plain `int`.

Invariants:

- K1 Nothing in this file checks a bound. A kernel checks every address against a capacity that its
  caller passed, before it touches it; no length or count found in the data is ever trusted.
- K2 Where a copy may run over (`copy_with_slack`), both sides own `SLACK` bytes behind the run.
- K3 The machine is little-endian (x86-64, aarch64); Kafka's fields are big-endian.

numba caches compiled kernels in `__pycache__`. It invalidates the cache when the kernel's own file
changes, but not when a file changes whose functions were compiled into it. `kernel` therefore adds
a fingerprint of the shared files to the cached name: a change there recompiles all kernels.
"""

from __future__ import annotations

import hashlib
import pkgutil
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

_Function = TypeVar("_Function", bound="Callable[..., Any]")

SLACK: Final = 160
"""Spare bytes behind a run that `copy_with_slack` may touch: 128 rounded up to 32-byte moves."""

_SHARED_FILES: Final = (
    "kernels_address.py",
    "kernels_crc32c.py",
    "kernels_columns.py",
    "kernels_check.py",
    "kernels_encode.py",
    "kernels_keys.py",
    "kernels_text.py",
)
"""Files whose functions are compiled into kernels of other files."""


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for name in _SHARED_FILES:
        try:
            digest.update(pkgutil.get_data("logmirror.wire", name) or b"")
        except OSError:  # an installation without sources cannot be edited either
            continue
    return digest.hexdigest()[:12]


_FINGERPRINT: Final = _fingerprint()


def kernel(signature: str) -> Callable[[_Function], _Function]:
    """Compile a function for Python to call: eagerly, cached on disk, without the GIL.

    Args:
        signature: numba's notation, for example `int64(int64,int64)`; addresses are int64.
    """

    def compile_one(function: _Function) -> _Function:
        function.__qualname__ += f"_{_FINGERPRINT}"
        try:
            return cast("_Function", njit(signature, cache=True, nogil=True)(function))
        except RuntimeError:  # no folder to cache in: compile in every process, two seconds each
            return cast("_Function", njit(signature, nogil=True)(function))

    return compile_one


def inlined(function: _Function) -> _Function:
    """Compile a function for other kernels to call; the optimiser inlines it there."""
    return cast("_Function", njit(nogil=True, forceinline=True)(function))


_I64: Final = ir.IntType(64)


def _make_load(width: int, *, signed: bool) -> Callable[[int], int]:
    """A load of `width` bits at any alignment, widened to 64."""
    narrow = ir.IntType(width)

    @intrinsic
    def load(_typing_context: Any, _address: Any) -> Any:  # noqa: ANN401  # numba's own types
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401  # LLVM values
            value = builder.load(builder.inttoptr(args[0], narrow.as_pointer()))
            value.align = 1
            if width == _I64.width:
                return value
            return builder.sext(value, _I64) if signed else builder.zext(value, _I64)

        return types.int64(types.int64), generate

    return cast("Callable[[int], int]", load)


def _make_store(width: int) -> Callable[[int, int], None]:
    """A store of the low `width` bits at any alignment."""
    narrow = ir.IntType(width)

    @intrinsic
    def store(_typing_context: Any, _address: Any, _value: Any) -> Any:  # noqa: ANN401  # numba's own types
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401  # LLVM values
            value = args[1] if width == _I64.width else builder.trunc(args[1], narrow)
            done = builder.store(value, builder.inttoptr(args[0], narrow.as_pointer()))
            done.align = 1
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return cast("Callable[[int, int], None]", store)


def _make_swap(width: int) -> Callable[[int], int]:
    """Reverse the low `width` bits bytewise, then widen with sign."""
    narrow = ir.IntType(width)

    @intrinsic
    def swap(_typing_context: Any, _value: Any) -> Any:  # noqa: ANN401  # numba's own types
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401  # LLVM values
            if width == _I64.width:
                return builder.bswap(args[0])
            return builder.sext(builder.bswap(builder.trunc(args[0], narrow)), _I64)

        return types.int64(types.int64), generate

    return cast("Callable[[int], int]", swap)


load_u8 = _make_load(8, signed=False)
load_i32 = _make_load(32, signed=True)
load_i64 = _make_load(64, signed=True)
store_8 = _make_store(8)
store_16 = _make_store(16)
store_32 = _make_store(32)
store_64 = _make_store(64)
_swap_16 = _make_swap(16)
_swap_32 = _make_swap(32)
_swap_64 = _make_swap(64)
_load_i16 = _make_load(16, signed=True)


@intrinsic
def _shift_right(_typing_context: Any, _value: Any, _bits: Any) -> Any:  # noqa: ANN401  # numba's own types
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401  # LLVM values
        return builder.lshr(args[0], args[1])

    return types.int64(types.int64, types.int64), generate


shift_right = cast("Callable[[int, int], int]", _shift_right)
"""Logical shift of the 64-bit pattern; Python's `>>` would drag the sign along."""


@intrinsic
def _memcpy(_typing_context: Any, _to: Any, _source: Any, _size: Any) -> Any:  # noqa: ANN401  # numba's own types
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401  # LLVM values
        pointer = ir.IntType(8).as_pointer()
        to, source = (builder.inttoptr(value, pointer) for value in args[:2])
        cgutils.raw_memcpy(builder, to, source, args[2], 1)  # type: ignore[no-untyped-call]  # numba
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


copy = cast("Callable[[int, int, int], None]", _memcpy)
"""Copy exactly `size` bytes: copy(to, source, size)."""


@intrinsic
def _move32(_typing_context: Any, _to: Any, _source: Any) -> Any:  # noqa: ANN401  # numba's own types
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401  # LLVM values
        vector = ir.VectorType(ir.IntType(8), 32).as_pointer()
        value = builder.load(builder.inttoptr(args[1], vector))
        value.align = 1
        done = builder.store(value, builder.inttoptr(args[0], vector))
        done.align = 1
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


_copy32 = cast("Callable[[int, int], None]", _move32)


@inlined
def copy_with_slack(to: int, source: int, size: int, source_end: int) -> None:
    """Copy `size` bytes, short runs in whole 32-byte moves.

    The target must own SLACK bytes behind the run (K2). The source need not: near `source_end`, the
    end of its readable memory, the copy is exact.
    """
    if size <= 128 and source + SLACK <= source_end:  # noqa: PLR2004  # see SLACK
        _copy32(to, source)
        done = 32
        while done < size:
            _copy32(to + done, source + done)
            done += 32
    else:
        copy(to, source, size)


@inlined
def load_be16(address: int) -> int:
    """Big-endian int16, sign kept."""
    return _swap_16(_load_i16(address))


@inlined
def load_be32(address: int) -> int:
    """Big-endian int32, sign kept. Reads 4 bytes."""
    return _swap_32(load_i32(address))


@inlined
def load_be64(address: int) -> int:
    """Big-endian int64."""
    return _swap_64(load_i64(address))


@inlined
def store_be16(address: int, value: int) -> None:
    """The low 16 bits, big-endian."""
    store_16(address, _swap_16(value))


@inlined
def store_be32(address: int, value: int) -> None:
    """The low 32 bits, big-endian."""
    store_32(address, _swap_32(value))


@inlined
def store_be64(address: int, value: int) -> None:
    """Big-endian int64."""
    store_64(address, _swap_64(value))


@inlined
def unzigzag(pattern: int) -> int:
    """0, 1, 2, 3 -> 0, -1, 1, -2: Kafka's varints keep the sign in the lowest bit."""
    return shift_right(pattern, 1) ^ -(pattern & 1)


@inlined
def read_varint(position: int, end: int, last_shift: int, last_byte_max: int) -> tuple[int, int]:
    """Read a zigzag varint.

    Args:
        position: Address of its first byte.
        end: Address behind the last byte that may be read.
        last_shift: Shift of the last byte allowed: 28 for a 32-bit varint, 63 for a 64-bit varlong.
        last_byte_max: Largest value of that last byte; more would not fit the width.

    Returns:
        Value and address behind it; address 0 when cut off, too long or too large.
    """
    if position >= end:
        return 0, 0
    byte = load_u8(position)
    position += 1
    if byte < 128:  # noqa: PLR2004  # the continuation bit
        return unzigzag(byte), position
    pattern = byte & 127
    shift = 7
    while position < end and shift < last_shift:
        byte = load_u8(position)
        position += 1
        pattern |= (byte & 127) << shift
        if byte < 128:  # noqa: PLR2004  # the continuation bit
            return unzigzag(pattern), position
        shift += 7
    if position >= end:
        return 0, 0
    byte = load_u8(position)
    if byte > last_byte_max:
        return 0, 0
    return unzigzag(pattern | (byte << shift)), position + 1


@inlined
def read_varint32(position: int, end: int) -> tuple[int, int]:
    """Read a varint of at most 5 bytes; see `read_varint`."""
    return read_varint(position, end, 28, 15)


@inlined
def read_varint64(position: int, end: int) -> tuple[int, int]:
    """Read a varlong of at most 10 bytes; see `read_varint`."""
    return read_varint(position, end, 63, 1)

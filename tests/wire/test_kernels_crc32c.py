"""CRC-32C is right at every length, by each implementation that a machine may use.

Method: lengths around every boundary between the loops, against a slow and independent
implementation. The code for aarch64 is compiled and inspected, since it cannot run here.
"""

import llvmlite.binding as llvm
import numpy as np
import pytest
from kafka.record.util import calc_crc32c
from llvmlite import ir
from numba import njit

from logmirror.wire.kernels_crc32c import (
    INSTRUCTIONS,
    best_step,
    crc32c_at,
    step,
    step_by_table,
)
from logmirror.wire.scan import address_of

BORDERS = [7, 8, 9, 767, 768, 769, 775, 24_575, 24_576, 24_577, 25_344, 60_001]


def noise(size):
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("size", [*range(7), *BORDERS])
@pytest.mark.parametrize("misaligned", [0, 1])
def test_every_length_at_any_address(size, misaligned):
    data = noise(size + misaligned)[misaligned:]
    assert crc32c_at(address_of(data), size) == calc_crc32c(data.tobytes())


def test_the_standard_s_example():
    data = np.frombuffer(b"123456789", np.uint8)
    assert crc32c_at(address_of(data), 9) == 0xE3069283


@njit
def both_steps(register, word):
    return step(register, word), step_by_table(register, word)


def test_the_tables_do_what_the_instruction_does():
    rng = np.random.default_rng(1)
    for word in [0, 1, -1, 2**63 - 1, -(2**63), *rng.integers(-(2**63), 2**63 - 1, 200)]:
        register = int(rng.integers(0, 2**32))
        by_instruction, by_table = both_steps(register, int(word))
        assert by_instruction == by_table


def test_a_machine_that_lacks_the_instruction_takes_the_tables():
    assert best_step("x86_64", {"crc32": False}) is step_by_table
    assert best_step("aarch64", {}) is step_by_table
    assert best_step("riscv64", {"crc32": True}) is step_by_table
    assert best_step("AMD64", {"crc32": True}) is not step_by_table


@pytest.mark.parametrize(
    ("machine", "triple", "features", "instruction"),
    [
        ("x86_64", "x86_64-unknown-linux-gnu", "+crc32", "crc32q"),
        ("aarch64", "aarch64-unknown-linux-gnu", "+crc", "crc32cx"),
    ],
)
def test_the_named_intrinsic_becomes_one_instruction(machine, triple, features, instruction):
    name, narrow, feature = INSTRUCTIONS[machine]
    assert f"+{feature}" == features
    wide = ir.IntType(64)
    register = ir.IntType(32) if narrow else wide
    module = ir.Module()
    module.triple = triple
    kind = ir.FunctionType(register, [register, wide])
    outer = ir.Function(module, kind, "one_step")
    builder = ir.IRBuilder(outer.append_basic_block())
    builder.ret(builder.call(ir.Function(module, kind, name), outer.args))

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(triple).create_target_machine(features=features)
    assembly = target.emit_assembly(llvm.parse_assembly(str(module)))
    assert instruction in assembly

"""What Triton kernels share: how they start, and numbers as whole numbers in order. Imported only where Triton is there."""

import triton
import triton.language as tl
from triton.language.extra import cuda

LAST = tl.constexpr(2**31 - 1)
NO_KEY = tl.constexpr(1 - 2**63)
"""Stands for no column; below the key of every number, and no number itself."""


@triton.jit
def touch(place):
    """Write one number: the smallest kernel, launched to find out whether any can be; grid [1]."""
    tl.store(place, 1)


@triton.jit
def wait_for_others(PDL: tl.constexpr):
    """With programmatic dependent launch: wait until all kernels before this one are done.

    A kernel launched so has to begin with it, before it reads or writes anything.
    """
    if PDL:
        cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """With programmatic dependent launch: let the next kernel get ready while this one goes on.

    Not too early in a kernel of many programs: the next one's would crowd on the first multiprocessors that get free.
    """
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def in_order(number_X):
    """Return 32-bit whole numbers in the order of float32 numbers: both zeros alike, and what is not a number the largest."""
    bits_X = tl.where(number_X == 0, 0.0, number_X).to(tl.int32, bitcast=True)
    # Below zero a larger number has smaller bits.
    order_X = tl.where(bits_X < 0, bits_X ^ LAST, bits_X)
    return tl.where(number_X != number_X, LAST, order_X)


@triton.jit
def as_number(order):
    """Return the numbers at places in the order of numbers."""
    return tl.where(order < 0, order ^ LAST, order).to(tl.float32, bitcast=True)


@triton.jit
def number_of(key):
    """Return the numbers that keys stand for."""
    return as_number((key >> 32).to(tl.int32))


@triton.jit
def keys_of(number_C, column_C, real_C):
    """Return the keys of some numbers, the larger for the larger one, and of equal ones for the first column.

    A key is a number's place in the order of numbers above its column's, smaller ones first.
    """
    return tl.where(real_C, (in_order(number_C).to(tl.int64) << 32) | (-column_C + LAST).to(tl.int64), NO_KEY)

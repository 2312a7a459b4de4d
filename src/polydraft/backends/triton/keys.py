"""Helpers for Triton kernels: dependent launches, and sortable integer keys. Imported only if Triton is installed."""

import triton
import triton.language as tl
from triton.language.extra import cuda

LAST = tl.constexpr(2**31 - 1)
NO_KEY = tl.constexpr(1 - 2**63)
"""The key of no column: below the key of every number."""


@triton.jit
def touch(place):
    """Write one number: the smallest kernel, launched to find out whether kernels work at all; grid [1]."""
    tl.store(place, 1)


@triton.jit
def wait_for_others(PDL: tl.constexpr):
    """With programmatic dependent launch: wait until all earlier kernels are done.

    A kernel launched that way must call this before it reads or writes anything.
    """
    if PDL:
        cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """With programmatic dependent launch: let the next kernel get ready while this one goes on.

    Not too early in a kernel with many programs: the next kernel's would crowd the first free multiprocessors.
    """
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def in_order(number_X):
    """Return 32-bit whole numbers in the order of float32 numbers: both zeros are equal, and NaN is the largest."""
    bits_X = tl.where(number_X == 0, 0.0, number_X).to(tl.int32, bitcast=True)
    # A larger negative number has smaller bits.
    order_X = tl.where(bits_X < 0, bits_X ^ LAST, bits_X)
    return tl.where(number_X != number_X, LAST, order_X)


@triton.jit
def as_number(order):
    """Undo `in_order`."""
    return tl.where(order < 0, order ^ LAST, order).to(tl.float32, bitcast=True)


@triton.jit
def number_of(key):
    """Return the numbers of keys."""
    return as_number((key >> 32).to(tl.int32))


@triton.jit
def keys_of(number_C, column_C, real_C):
    """Return the keys of some numbers: larger for a larger number and, for equal ones, for the first column.

    The high bits hold the number's place in the order of numbers, the low bits its column, counted backwards.
    """
    return tl.where(real_C, (in_order(number_C).to(tl.int64) << 32) | (-column_C + LAST).to(tl.int64), NO_KEY)

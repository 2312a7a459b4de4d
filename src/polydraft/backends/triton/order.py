"""The order of floating-point numbers as whole numbers, for Triton kernels. Imported only where Triton is there."""

import triton
import triton.language as tl

_LAST = tl.constexpr(2**31 - 1)


@triton.jit
def in_order(number_X):
    """Return 32-bit whole numbers in the order of float32 numbers: both zeros alike, and what is not a number the largest."""
    bits_X = tl.where(number_X == 0, 0.0, number_X).to(tl.int32, bitcast=True)
    # Below zero a larger number has smaller bits.
    order_X = tl.where(bits_X < 0, bits_X ^ _LAST, bits_X)
    return tl.where(number_X != number_X, _LAST, order_X)

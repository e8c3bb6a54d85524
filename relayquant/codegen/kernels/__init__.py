"""Kernels: frozen specifications -> TIR functions and packed weights. Knows nothing of Relax.

A specification (`integer.specs.Conv2d`, `integer.elementwise.Add`, ...) and an instruction set
(`isa.base.Isa`, selected for a target) are the arguments of `build_*`, which makes a PrimFunc, and
of `pack_*`, which makes its constant operands in argument order. Every integer kernel computes the
package's default arithmetic bit for bit, whatever the instruction set.

    isa/        targets, and the primitives of their instructions
    integer/    convolutions, products, elementwise operators, lookup tables, pools; their
        requantization
    floating/   the same for float32
    grouped/    products with weights of few bits that stay packed in memory
    attention/  attention to keys in a cache or to all keys at once
    emit        building blocks of every kernel: header, vectors, loops
"""

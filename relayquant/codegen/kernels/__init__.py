"""Kernels: frozen specifications to TIR functions and packed weights. Knows nothing of Relax.

A specification (`integer.specs.Conv2d`, `integer.elementwise.Add`, ...) and an instruction set
(`isa.base.Isa`, selected for a target) give a PrimFunc by `build_*`, and its constant operands in
argument order by `pack_*`. Every integer kernel computes the package's default arithmetic bit for
bit, whatever the instruction set.

    isa/        targets, and the primitives of their instructions
    integer/    convolutions, products, element operators, tables, pools; requantization behind them
    floating/   the same for float32
    emit        what every kernel is written with: header, vectors, loops
"""

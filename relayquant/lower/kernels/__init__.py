"""Stage lower, kernels: integer operators as frozen specifications to TIR functions and weights.

A specification (`specs.Conv2d`, `elementwise.Add`, ...) and an instruction set (`isa.Isa`,
selected for a target) give a PrimFunc by `build_*`, and its constant operands in argument order by
`pack_*`. Every kernel computes the package's default arithmetic bit for bit, whatever the
instruction set.

    specs            Conv2d, Dense, PackedWeights         isa         instruction sets of x86,
    PORTABLE conv, conv_plan  convolution, dense; tiles, packing   epilogue    requantize,
    residual, clamp depthwise        one filter per channel               narrow      four vectors
    stored as bytes conv_transpose   phases of ordinary convolutions      operands    arguments,
    padded image, store matmul           two activations                      emit        loops,
    vectors, kernel header pool, elementwise                                     float_*     the
    same for float32
"""

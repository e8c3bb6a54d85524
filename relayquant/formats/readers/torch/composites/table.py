"""PyTorch reader: operators that TVM's frontend lacks, written in other operators. A part of
`decompositions`.

Each function takes the operator's arguments and is traced by PyTorch. It returns NotImplemented for
a case it cannot write, and the operator is then refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from relayquant.formats.readers.torch.complex_numbers import write_full, write_polar
from relayquant.formats.readers.torch.composites.numbers import (
    NEAR_ZERO,
    write_celu,
    write_clamp,
    write_copysign,
    write_erfc,
    write_exp2,
    write_fmax,
    write_fmin,
    write_hypot,
    write_ldexp,
    write_log_sigmoid,
    write_near_zero,
    write_pow,
    write_remainder,
    write_rrelu,
    write_sinc,
    write_xlogy,
)
from relayquant.formats.readers.torch.composites.products import (
    write_addbmm,
    write_addmv,
    write_cdist,
    write_convolution,
    write_grouped_product,
)
from relayquant.formats.readers.torch.composites.statistics import (
    write_any,
    write_bucketize,
    write_histc,
    write_norm_of_batch,
    write_searchsorted,
    write_sort,
    write_var,
    write_var_mean,
    write_vector_norm,
)
from relayquant.formats.readers.torch.composites.tensors import (
    write_arange,
    write_empty,
    write_index_reduce,
    write_masked_scatter,
    write_one_hot,
    write_pad,
    write_repeat,
    write_scalar_tensor,
    write_trilinear,
    write_unfold,
    write_unfold_backward,
)

Composite = Callable[..., Any]


#: Name of an operator in torch.ops.aten -> function that writes it in other operators.
COMPOSITES: dict[str, Composite] = {
    "addbmm.default": write_addbmm,
    "addmv.default": write_addmv,
    "any.default": write_any,
    "arange.start_step": write_arange,
    "bucketize.Tensor": write_bucketize,
    "bucketize.Scalar": write_bucketize,
    "_cdist_forward.default": write_cdist,
    "celu.default": write_celu,
    "clamp.Tensor": write_clamp,
    "constant_pad_nd.default": write_pad,
    "convolution.default": write_convolution,
    "copysign.Tensor": write_copysign,
    "copysign.Scalar": write_copysign,
    "empty.memory_format": write_empty,
    "erfc.default": write_erfc,
    "exp2.default": write_exp2,
    **{f"{name}.default": functools.partial(write_near_zero, name) for name in NEAR_ZERO},
    "fmax.default": write_fmax,
    "full.default": write_full,
    "fmin.default": write_fmin,
    "_grouped_mm.default": write_grouped_product,
    "histc.default": write_histc,
    "hypot.default": write_hypot,
    "index_reduce.default": write_index_reduce,
    "ldexp.Tensor": write_ldexp,
    "log_sigmoid.default": write_log_sigmoid,
    "linalg_vector_norm.default": write_vector_norm,
    "masked_scatter.default": write_masked_scatter,
    "_native_batch_norm_legit.no_stats": write_norm_of_batch,
    "one_hot.default": write_one_hot,
    "polar.default": write_polar,
    "pow.Tensor_Scalar": write_pow,
    "remainder.Scalar_Tensor": write_remainder,
    "repeat.default": write_repeat,
    "rrelu_with_noise_functional.default": write_rrelu,
    "scalar_tensor.default": write_scalar_tensor,
    "searchsorted.Tensor": write_searchsorted,
    "searchsorted.Scalar": write_searchsorted,
    "sort.stable": write_sort,
    "sinc.default": write_sinc,
    "_trilinear.default": write_trilinear,
    "unfold.default": write_unfold,
    "unfold_backward.default": write_unfold_backward,
    "var.correction": write_var,
    "var_mean.correction": write_var_mean,
    **{f"xlogy.{form}": write_xlogy for form in ("Tensor", "Scalar_Self", "Scalar_Other")},
}

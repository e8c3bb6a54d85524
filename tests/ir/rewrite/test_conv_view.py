"""What calls of convolutions and pools say, in any number of axes and any layout."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from relayquant.errors import QnnError
from relayquant.ir.rewrite.conv_view import ConvView


def tensor(*shape: int) -> relax.Expr:
    return relax.const(np.zeros(shape, "float32"))


def test_view__of_a_convolution():
    call = op.nn.conv2d(
        tensor(1, 8, 9, 4), tensor(3, 3, 2, 6), (1, 2), (1, 2, 3, 4), 2, 2, "NHWC", "HWIO", "NCHW"
    )
    assert ConvView.of(call) == ConvView(
        "NHWC", "HWIO", "NCHW", "HW", (1, 1), (1, 2), (1, 2, 3, 4), (2, 2), (0, 0), 2
    )
    assert ConvView.of(call).pads == ((1, 3), (2, 4))
    assert ConvView.of(call).order == "NHWC"


def test_view__of_a_transposed_convolution():
    call = op.nn.conv3d_transpose(tensor(1, 4, 5, 5, 5), tensor(4, 6, 1, 2, 3), 2, 1, (0, 1, 0))
    view = ConvView.of(call)
    assert (view.rank, view.strides, view.padding) == (3, (2, 2, 2), (1,) * 6)
    assert (view.output_padding, view.out_layout) == ((0, 1, 0), "NCDHW")


def test_view__of_a_pool():
    view = ConvView.of(op.nn.max_pool1d(tensor(1, 7, 4), 3, 2, (0, 1), 2, layout="NWC"))
    assert view == ConvView("NWC", "", "NWC", "W", (3,), (2,), (0, 1), (2,), (0,), 1)


def test_view__one_axis_is_the_width_of_a_row():
    flat = ConvView.of(op.nn.conv1d(tensor(1, 4, 9), tensor(6, 4, 3), 2, (1, 3), 2)).as_2d()
    assert (flat.strides, flat.padding, flat.dilation) == ((1, 2), (0, 1, 0, 3), (1, 2))
    assert (flat.window, flat.output_padding, flat.groups) == ((1, 1), (0, 0), 1)


@pytest.mark.parametrize("padding", [(1,), (1, 1), (1, 1, 1, 1)])
def test_padding__one_number_one_for_each_axis_or_for_each_side(padding):
    names = {"data_layout": "NCHW", "kernel_layout": "OIHW", "out_layout": "", "groups": 1}
    attrs = SimpleNamespace(strides=(1,), dilation=(1,), padding=padding, **names)
    assert ConvView.read(attrs).padding == (1, 1, 1, 1)
    attrs.strides = (1, 1, 1)
    with pytest.raises(QnnError, match=r"\[1, 1, 1\] has 3 numbers; allowed: 1 or 2"):
        ConvView.read(attrs)

"""Complex numbers and Fourier transforms of PyTorch programs: what PyTorch computes."""

from __future__ import annotations

import numpy as np
import pytest

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats.readers import import_torch

torch = pytest.importorskip("torch", reason="pip install torch")

functional, fft = torch.nn.functional, torch.fft
WINDOW = torch.hann_window(16)
SPIN = torch.polar(torch.ones(6, 4), torch.outer(torch.arange(6.0), 0.1 ** torch.arange(4.0)))
FILTER = torch.from_numpy(np.random.default_rng(1).normal(size=(6, 5, 2)).astype("float32"))


def draw(*shape):
    return torch.from_numpy(np.random.default_rng(0).normal(size=shape).astype("float32"))


def export(function, x, dynamic_shapes=None):
    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    return torch.export.export(Module(), (x,), dynamic_shapes=dynamic_shapes)


def check(mod, function, x):
    """Run the reference and compiled code beside PyTorch."""
    expected = function(x).resolve_neg().numpy()
    (reference,) = rq.reference.run(mod, [x.numpy()])
    (compiled,) = rq.Executor(rq.compile(mod)).run("main", [x.numpy()])
    size = np.abs(expected).max() or 1
    for found in (reference, compiled):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=3e-6 * size)


def transform(x, **kwargs):
    options = {"window": WINDOW, "return_complex": True, **kwargs}
    return torch.stft(x[:, 0], 16, 4, **options)


def filter_globally(x):
    """A layer of GFNet."""
    spectrum = fft.rfft2(x, dim=(1, 2), norm="ortho")
    return fft.irfft2(spectrum * torch.view_as_complex(FILTER), s=x.shape[1:], norm="ortho")


def rotate(x):
    """A rotary embedding by complex numbers, which are a constant of the program."""
    return torch.view_as_real(torch.view_as_complex(x.reshape(2, 6, 4, 2)) * SPIN).flatten(2)


def keep_modes(x):
    """A layer of a Fourier neural operator."""
    spectrum, kept = fft.rfft(x), torch.zeros(2, 6, 5, dtype=torch.cfloat)
    weight = torch.complex(torch.ones(6, 6, 3), torch.full((6, 6, 3), 2.0))
    kept[:, :, :3] = torch.einsum("bix,iox->box", spectrum[..., :3], weight)
    return fft.irfft(kept, n=8)


def write_real_numbers(x):
    spectrum = fft.rfft(x).clone()
    spectrum[:, :, :3] = x[:, :, :3]
    return torch.view_as_real(spectrum)


#: name -> function of (2, 6, 8)
CASES = {
    "fft2_of_fnet": lambda x: fft.fft(fft.fft(x, dim=-1), dim=-2).real,
    "global_filter": filter_globally,
    "rotary": rotate,
    "fourier_operator": keep_modes,
    "rfft_padded": lambda x: torch.view_as_real(fft.rfft(x, n=11, dim=1)),
    "fft_cropped": lambda x: torch.view_as_real(fft.fft(x, n=5, norm="forward")),
    "ifft": lambda x: torch.view_as_real(fft.ifft(torch.complex(x, x + 1), norm="ortho")),
    "ifft_of_real": lambda x: torch.view_as_real(fft.ifft2(x)),
    "irfft_odd": lambda x: fft.irfft(torch.complex(x, x), n=9, norm="forward"),
    "irfftn": lambda x: fft.irfftn(fft.rfftn(x), s=x.shape),
    "hfft": lambda x: fft.hfft(torch.complex(x, -x)),
    "fftshift": lambda x: fft.fftshift(fft.fft2(x)).imag,
    "correlation": lambda x: fft.irfft(fft.rfft(x, n=16) * fft.rfft(x, n=16).conj(), n=16),
    "imag_of_conj": lambda x: fft.rfft(x).conj().imag,
    "angle": lambda x: torch.complex(x, x.flip(0)).angle(),
    "abs_of_large": lambda x: (torch.complex(x, x) * 1e25).abs(),
    "abs_of_small": lambda x: (torch.complex(x, -x) * 1e-25).abs(),
    "abs_of_zero": lambda x: (torch.complex(x, x) * 0).abs(),
    "times_number": lambda x: torch.view_as_real(fft.rfft(x) * (2 - 1j) / 3),
    "times_mask": lambda x: (fft.rfft(x) * (x[..., :5] > 0)).abs(),
    "times_constant": lambda x: (x * torch.tensor(1j)).imag,
    "quotient": lambda x: torch.view_as_real(fft.fft(x) / fft.fft(x.flip(0) + 1)),
    "quotient_of_large": lambda x: (1 / (torch.complex(x, x + 3) * 1e25)).abs() * 1e25,
    "scaled_sum": lambda x: torch.view_as_real(torch.add(fft.fft(x), x, alpha=2)),
    "difference": lambda x: torch.view_as_real(1j - fft.fft(x)),
    "square": lambda x: torch.view_as_real(fft.fft(x) ** 2),
    "exp": lambda x: torch.view_as_real(torch.exp((0.5 + 1j) * x)),
    "log": lambda x: torch.view_as_real(torch.log(torch.complex(x, x.flip(0)))),
    "matmul": lambda x: torch.view_as_real(torch.complex(x, x) @ fft.fft(x).mT),
    "mean": lambda x: fft.rfft(x).mean((0, 2)).abs(),
    "moves": lambda x: torch.cat([fft.fft(x), fft.fft(x).roll(1, -1)], 1)[:, 2:, None].mT.abs(),
    "split": lambda x: fft.fft(x).split(3, 1)[1].imag,
    "unfold": lambda x: torch.view_as_real(fft.fft(x).unfold(1, 3, 2)),
    "where": lambda x: torch.where(x > 0, fft.fft(x), fft.fft(x).conj()).imag,
    "pad": lambda x: torch.view_as_real(functional.pad(fft.rfft(x), (1, 2))),
    "float64": lambda x: fft.rfft(x.double()).abs(),
    "wider": lambda x: torch.view_as_real(fft.rfft(x).to(torch.complex128)),
    "real_into_complex": write_real_numbers,
    "cat_with_real": lambda x: torch.view_as_real(torch.cat([fft.fft(x), x])),
    "over_number": lambda x: torch.view_as_real(fft.fft(x.double()) / (0.1 + 0.3j)),
    "to_real": lambda x: torch.complex(x, x).real.relu(),
}


@pytest.mark.parametrize("name", CASES)
def test_complex__computes_what_torch_computes(name):
    x = draw(2, 6, 8)
    check(import_torch(export(CASES[name], x))[0], CASES[name], x)


FRAMES = {
    "centered": {},
    "bare": {"center": False, "window": None},
    "short_window": {"win_length": 12, "window": WINDOW[:12], "normalized": True},
    "two_sided": {"onesided": False, "pad_mode": "constant"},
    "uneven_step": {"hop_length": 5},
    "apart": {"hop_length": 19},
}


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.filterwarnings("ignore:A window was not provided")
def test_stft__every_option(name):
    options = {"n_fft": 16, "hop_length": 4, "window": WINDOW, **FRAMES[name]}

    def function(x):
        return torch.view_as_real(torch.stft(x, **options, return_complex=True))

    x = draw(2, 100)
    check(import_torch(export(function, x))[0], function, x)


def test_stft__log_mel_of_whisper():
    def function(x):
        power = torch.stft(x, 400, 160, window=window, return_complex=True)[..., :-1].abs() ** 2
        logs = torch.clamp(filters @ power, min=1e-10).log10()
        return (torch.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0

    window, filters = torch.hann_window(400), draw(80, 201).abs()
    x = draw(1, 3200)
    check(import_torch(export(function, x))[0], function, x)


@pytest.mark.parametrize("options", [{}, {"length": 90}, {"normalized": True}])
def test_istft__gives_the_signal(options):
    def function(x):
        spectrum = torch.stft(x, 16, 4, window=WINDOW, return_complex=True)
        return torch.istft(spectrum * 2j * -1j, 16, 4, window=WINDOW, **options)

    x = draw(2, 100)
    mod = import_torch(export(function, x))[0]
    check(mod, function, x)


@pytest.mark.parametrize(("size", "step"), [(16, 4), (16, 5), (3, 3), (2, 5)])
def test_unfold_backward__adds_windows(size, step):
    count = (40 - size) // step + 1

    def function(x):
        return torch.ops.aten.unfold_backward(x, [2, 40, 3], 1, size, step)

    x = draw(2, count, 3, size)
    check(import_torch(export(function, x))[0], function, x)


def test_stft__symbolic_sizes():
    def function(x):
        return torch.stft(x, 16, 5, window=WINDOW, return_complex=True).abs()

    auto = torch.export.Dim.AUTO
    mod = import_torch(export(function, draw(2, 100), ({0: auto, 1: auto},)))[0]
    for shape in ((2, 100), (3, 57)):
        check(mod, function, draw(*shape))


def test_complex__parameters_of_the_module_stay():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.view_as_complex(FILTER.clone()))
            self.register_buffer("shift", self.weight.detach().conj())

        def forward(self, x):
            return torch.view_as_real(fft.rfft2(x) * self.weight + self.shift)

    module, x = Module(), draw(2, 6, 8)
    program = torch.export.export(module, (x,))
    for _ in range(2):
        check(import_torch(program)[0], lambda x: module(x).detach(), x)
    assert program.state_dict["weight"].is_complex()


def test_spectrogram__is_quantized():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Conv1d(9, 8, 3)

        def forward(self, x):
            power = torch.stft(x, 16, 4, window=WINDOW, return_complex=True).abs().square()
            return self.layer((power + 1e-6).log())

    torch.manual_seed(0)
    module, data = Module().eval(), [draw(2, 100).numpy()]
    mod, params = import_torch(torch.export.export(module, (draw(2, 100),)))
    rows = rq.ledger(rq.quantize(mod, params, data * 4)).to_dict()["operators"]
    assert any(row["quantized"] and row["op"] == "nn.conv1d" for row in rows)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fft.rfft, r"complex inputs, results or state \('_fft_r2c'\).*return torch.view_as_real"),
        (
            lambda x: fft.rfft(x).sqrt().abs(),
            r"'sqrt' .*complex numbers; supported: Fourier .*torch.view_as_real\(z\) has both",
        ),
        (lambda x: fft.fft(torch.complex(x, x).to(torch.complex32)).real, "complex32; supported"),
    ],
)
def test_complex__refused_by_name(function, message):
    with pytest.raises(ModelError, match=message):
        import_torch(export(function, draw(2, 8)))


def test_complex_input__refused_with_what_to_write():
    x = torch.complex(draw(2, 8), draw(2, 8))
    with pytest.raises(ModelError, match=r"\('x'\); supported: real .*torch.view_as_complex\(x\)"):
        import_torch(export(lambda x: x.abs(), x))


def test_transform__of_a_symbolic_axis_is_refused():
    program = export(lambda x: fft.rfft(x).abs(), draw(2, 8), ({1: torch.export.Dim("n")},))
    with pytest.raises(ModelError, match=r"transforms a symbolic number .*Fix the symbolic sizes"):
        import_torch(program)

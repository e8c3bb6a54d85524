"""
Train with quantization
=======================

Weights of 2 bits have four values. Calibration picks the best scale and the best rounding, and a
small network still loses answers; training with the rounding in place brings most of them back.
PyTorch is not installed with relayquant: ``pip install 'relayquant[torch]'``.
"""

# %%
# What calibration reaches
# ------------------------
# The digits of the built-in example, with weights of -2..1, one scale per output channel. The
# answers of the float model on images that nothing is chosen by are what counts.

import sys

import relayquant as rq
from relayquant.demo import load_digits

try:
    import torch
except ImportError:
    print("This tutorial needs PyTorch. Run: pip install 'relayquant[torch]'")
    sys.exit(0)

demo = load_digits(batch=32)
mod, params = rq.load(demo.model_path)
(expected,) = rq.reference.run(mod, [demo.images])

spec = rq.QSpec(
    "int8", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_CHANNEL, quant_min=-2, quant_max=1
)
config = rq.QConfig(
    rq.get_backend_config("x86").default_qconfig.activation,
    rq.TensorConfig(spec, rq.observers.MinMax()),
)
options = {"qconfig_mapping": rq.QConfigMapping().set_global(config), "backend": "x86"}


def measure(module):
    (got,) = rq.reference.run(module, [demo.images])
    return (got.argmax(1) == expected.argmax(1)).mean()


calibrated = rq.quantize(mod, params, demo.calibration, guard=rq.config.Guard.OFF, **options)
print(f"calibrated: {measure(calibrated):.1%} of the answers of float")

# %%
# One call
# --------
# ``finetune`` starts from calibration and trains weights, biases and scales until the outputs are
# those of the float model again. It needs no labels. The best state on ``validation_dataset``
# counts, of which the calibrated one is the first: data that is not trained on, where there is more
# than these 128 images. Without it, a tenth of the items is held back. ``checkpoint="file"`` makes
# it resumable. Few bits want a large rate: a weight has to move half a step to become another.


class Report(rq.Callback):
    def on_training(self, event):
        print(f"step {event.step:3d}: loss {event.loss:7.4f}, validation {event.score:.4f}")


trained = rq.torch.finetune(
    mod,
    params,
    demo.calibration,
    steps=100,
    lr=3e-2,
    validation_dataset=demo.calibration,
    callbacks=Report(),
    **options,
)
print(f"trained: {measure(trained):.1%}")
print(rq.ledger(trained).to_dict()["choices"]["training"])

# %%
# Your own loop
# -------------
# ``from_relax`` gives a ``torch.nn.Module`` of a Relax module, ``prepare_qat`` of a PyTorch one.
# It rounds where the integer module will, and any loop trains it: here 8 bits on float's answers.

module = rq.torch.from_relax(mod, params, calibration_dataset=demo.calibration, effort="fast")
teacher = rq.torch.from_relax(mod, params)
batches = [torch.from_numpy(batch) for batch in demo.calibration]
optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)
module.train()
for _ in range(2):
    for x in batches:
        with torch.no_grad():
            answers = teacher(x).argmax(1)
        loss = torch.nn.functional.cross_entropy(module(x), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
module.freeze_ranges()  # scales stay from here on, as after FX's disable_observer

# %%
# The Trainer of transformers
# ---------------------------
# It trains the same module, inside one that returns a loss. This part is left out where
# ``transformers`` and ``accelerate`` are not installed.

try:
    from transformers import Trainer, TrainingArguments
except ImportError:
    print("no Trainer here. Run: pip install transformers accelerate")
else:

    class Classifier(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, images, labels):
            scores = self.inner(images)
            return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}

    with torch.no_grad():
        rows = [
            {"images": image, "labels": label}
            for x in batches
            for image, label in zip(x, teacher(x).argmax(1), strict=True)
        ]
    arguments = TrainingArguments(
        "trainer",
        num_train_epochs=1,
        per_device_train_batch_size=32,
        learning_rate=1e-5,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(Classifier(module), arguments, train_dataset=rows).train()

# %%
# The integer module
# ------------------
# ``convert`` gives what ``quantize`` gives for these weights and scales: ledger, kernels and export
# are the same. The module in evaluation mode agrees with it within one step in every value.

qmod = rq.torch.convert(module.eval())
with torch.no_grad():
    fake = module(torch.from_numpy(demo.images)).numpy()
(integer,) = rq.reference.run(qmod, [demo.images])
print(f"own loop: {measure(qmod):.1%}")
print(f"same answers as the module: {(fake.argmax(1) == integer.argmax(1)).mean():.1%}")
print(f"compiled code equals numpy: {rq.verify(qmod, [demo.images[:4]]).is_equal}")

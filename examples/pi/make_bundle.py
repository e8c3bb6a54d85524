"""On the PC: quantize the built-in digits model for a Raspberry Pi and write a folder to copy.

    python make_bundle.py digits-pi --cpu cortex-a76 --runtime wheels

--cpu: cortex-a76 for a Raspberry Pi 5, cortex-a72 for a 4, cortex-a53 for a 3 or a Zero 2, each
with a 64-bit system. README.md says where the wheels come from.
"""

import argparse
from pathlib import Path

import numpy as np

import relayquant as rq
from relayquant.demo import load_digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cpu", default="cortex-a76")
    parser.add_argument("--runtime", type=Path, help="folder with wheels of TVM for aarch64")
    options = parser.parse_args()

    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": options.cpu}
    demo = load_digits()
    mod, params = rq.load(demo.model_path)
    backend = rq.get_backend_config(target=target)
    qmod = rq.quantize(mod, params, demo.calibration, backend=backend, effort="fast")
    folder = rq.export_bundle(qmod, options.folder, target, runtime=options.runtime)

    # Something to try it on: images, and what the numpy reference makes of them.
    images = demo.images[:16]
    np.savez(folder / "check.npz", image=images, logits=rq.reference.run(qmod, [images])[0])
    images.tofile(folder / "image.bin")
    print(f"Copy {folder} to the board.")


if __name__ == "__main__":
    main()

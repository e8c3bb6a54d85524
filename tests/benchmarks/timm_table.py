"""Networks of `timm` with random weights -> times beside OpenVINO, as the table of docs/speed.md.

    python tests/benchmarks/timm_table.py convnext_atto swin_tiny_patch4_window7_224 [--folder DIR]

Without names it measures all of the table. Needs timm and OpenVINO with NNCF. Each network is
exported to ONNX, and timed by `relayquant bench` with one thread and one picture. What was measured
is kept in docs/timm.json, with what other CPUs measured, and the table is made of all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from speed_table import (
    ROOT,
    Results,
    head_table,
    read_results,
    shorten_cpu,
    write_results,
    write_table,
)

from relayquant.base.storage.files import open_temporary_folder

#: what is in the table, by kind
NETWORKS = {
    "convolutions": (
        "regnety_008", "regnetx_008", "resnext50_32x4d", "seresnet50", "skresnet18",
        "res2net50_26w_4s", "densenet121", "dla34", "vovnet39a", "hrnet_w18_small", "selecsls42b",
        "repvgg_a0", "inception_v4", "xception41", "nfnet_l0", "hgnet_tiny", "convmixer_768_32",
    ),
    "convolutions for phones": (
        "mobilenetv3_large_100", "mobilenetv4_conv_small", "mnasnet_100", "ghostnet_100",
        "ghostnetv2_100", "efficientnet_lite0", "efficientnetv2_rw_t", "mixnet_s", "tinynet_a",
        "lcnet_100", "hgnetv2_b0", "starnet_s1", "convnext_atto", "inception_next_atto",
        "mambaout_femto",
    ),
    "attention": (
        "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "pvt_v2_b0", "twins_pcpvt_small",
        "crossvit_9_240", "xcit_nano_12_p16_224", "coat_lite_tiny", "davit_tiny", "nest_tiny",
        "visformer_tiny", "maxvit_rmlp_pico_rw_256", "coatnet_pico_rw_224", "levit_128s",
        "tiny_vit_5m_224", "efficientvit_m2", "mobilevit_xs", "mobilevitv2_075",
        "edgenext_xx_small", "efficientformerv2_s0", "fastvit_t8",
    ),
    "other mixers": ("mixer_s32_224", "resmlp_12_224", "gmlp_ti16_224", "poolformer_s12"),
}  # fmt: skip
LARGEST_PICTURE = 256
RESULTS = ROOT / "docs/timm.json"
KINDS = ("int8", "float")


def export_network(name: str, file: Path) -> None:
    """Write a network as ONNX. Its batch norms have statistics as after training."""
    import timm  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    network: Any = timm.create_model(name, pretrained=False).eval()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    size = min(network.default_cfg["input_size"][-1], LARGEST_PICTURE)
    picture = torch.randn(1, 3, size, size)
    with torch.no_grad():
        torch.onnx.export(network, (picture,), file, dynamo=False, opset_version=17)


def measure_network(file: Path, rounds: int) -> tuple[str, list[str], dict[str, float]]:
    """Return the CPU, all versions, and the best time of each candidate in ms."""
    command = ["bench", str(file), "--against", "openvino", "--threads", "1", "--operators", "0"]
    run = subprocess.run(
        [sys.executable, "-m", "relayquant", *command, "--repeat", str(rounds), "--json"],
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(run.stdout)
    times = {row["name"]: row["best"] * 1e3 for row in found["tables"]["latencies"]}
    return found["summary"]["cpu"], found["summary"]["versions"], times


def choose_times(times: dict[str, float]) -> dict[str, list[float]]:
    """Kind -> our time, and the one of OpenVINO's faster model."""
    return {
        kind: [
            round(times[f"relayquant {kind}"], 3),
            round(min(t for key, t in times.items() if key.startswith(f"openvino {kind}")), 3),
        ]
        for kind in KINDS
    }


def format_table(results: Results) -> str:
    """A table of all networks: for each CPU our time, and how many times as long OpenVINO takes."""
    lines = [
        f"**{cpu}** ({', '.join(entry['versions'])}), 1 thread  " for cpu, entry in results.items()
    ]
    heads = [f"{shorten_cpu(cpu)}, {kind}" for cpu in results for kind in KINDS]
    lines += ["", *head_table(["network", *heads])]
    for group, names in NETWORKS.items():
        lines.append(f"| *{group}* |" + " |" * len(heads))
        for name in names:
            cells = []
            for entry in results.values():
                measured = entry["times"].get(name)
                for kind in KINDS:
                    own, rival = measured[kind] if measured else (0, 0)
                    cells.append(f"{own:.2f} ({rival / own:.2f})" if own else "")
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", help="default: all of the table")
    parser.add_argument("--folder", type=Path, help="keeps the exported networks")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    results = read_results(RESULTS)
    with ExitStack() as stack:
        folder = options.folder or stack.enter_context(open_temporary_folder())
        for name in options.networks or [each for names in NETWORKS.values() for each in names]:
            if not (file := folder / f"{name}.onnx").exists():
                export_network(name, file)
            cpu, versions, times = measure_network(file, options.rounds)
            if results.get(cpu, {}).get("versions") != versions:
                results[cpu] = {"versions": versions, "times": {}}
            results[cpu]["times"][name] = chosen = choose_times(times)
            print(name, chosen, flush=True)
            write_results(results, RESULTS)
    write_table(ROOT / "docs/speed.md", format_table(results), "timm")


if __name__ == "__main__":
    main()

"""Whole networks in every engine and number format, one image on all cores: the table of docs/performance.md.

python scripts/engine_table.py --export --folder build/engines     # ONNX files of every network and size, an hour
python scripts/engine_table.py --rounds 5 --folder build/engines   # on a machine that does nothing else
python scripts/engine_table.py --table --folder build/engines

A round has an engine after the other, each a process of its own, since their threads disturb each other; within it the
mechanisms take turns. What was measured is kept in FOLDER/times.json and more rounds add to it; the table has medians
of rounds. OpenVINO reads the same ONNX files. A cell that an engine can't compute here has its reason in that file.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MECHANISMS = ["softmax", "linear", "focused", "inline", "agent", "pola", "soft"]
NETWORKS = ["deit_tiny", "timm/vit_small_patch14_dinov2"]
TRANSFORMERS: dict[str, tuple[str, dict[str, int]]] = {
    "dinov2_small": ("Dinov2", {"hidden_size": 384, "num_attention_heads": 6, "patch_size": 14}),
    "dinov3_small": ("DINOv3ViT", {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}),
    "clip_base_patch16": ("CLIPVision", {"patch_size": 16}),
    "siglip_base_patch16": ("SiglipVision", {"patch_size": 16}),
}
"""transformers' model and what of its configuration is not as it is there, by a name."""
Entry = dict[str, Any]


def network(name: str, attention: str, size: int) -> Any:
    """A network with made-up weights; one of timm or transformers is converted, one of ours is made so, or as it is."""
    import timm
    import torch

    import subquad
    from subquad.attention import ATTENTION
    from subquad.attention.traits import traits_of

    torch.manual_seed(0)
    if name.startswith("timm/"):
        model = timm.create_model(name.removeprefix("timm/"), img_size=size)
        return (model if attention == "softmax" else subquad.convert(model, attention)).eval()
    if name.startswith("transformers/"):
        import transformers

        kind, settings = TRANSFORMERS[name.removeprefix("transformers/")]
        config = getattr(transformers, f"{kind}Config")(**settings, image_size=size)
        model = getattr(transformers, f"{kind}Model")(config)
        return (model if attention == "softmax" else subquad.convert(model, attention)).eval()
    chosen: dict[str, Any] = {} if attention == "own" else {"attention": attention}
    if attention in ATTENTION and "prefix" in traits_of(ATTENTION[attention]).refuses:
        chosen |= {"class_token": False, "global_pool": "avg"}
    return subquad.create_model(name, **chosen, img_size=size).eval()


def file_of(folder: Path, name: str, attention: str, size: int) -> Path:
    """Where the ONNX file of a network lies."""
    return folder / f"{name.replace('/', '-')}-{attention}-{size}.onnx"


def by_torch(model: Any, size: int, form: str) -> Callable[[], Any]:
    """PyTorch with our kernels, as it is or by `subquad.optimize`."""
    import torch

    import subquad

    if "optimized" in form:
        model = subquad.optimize(model, torch.bfloat16 if "bf16" in form else None) or model
    elif "bf16" in form:
        model = model.bfloat16()
    image = torch.randn(1, 3, size, size, dtype=torch.bfloat16 if "bf16" in form else torch.float32)

    def run() -> Any:
        with torch.inference_mode():
            return model(image)

    return run


def by_onnxruntime(path: Path, size: int, threads: int) -> Callable[[], Any]:
    """ONNX Runtime in fp32."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # else the threads of each session wait busily for its next pass, while those of the others work
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    image = np.random.default_rng(0).standard_normal((1, 3, size, size), np.float32)
    return lambda: session.run(None, {"images": image})


def by_openvino(path: Path, size: int, threads: int, form: str) -> Callable[[], Any]:
    """OpenVINO in the precision that the form says."""
    import numpy as np
    import openvino

    precision = "bf16" if "bf16" in form else "f32"
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    image = np.random.default_rng(0).standard_normal((1, 3, size, size), np.float32)
    return lambda: request.infer([image])


ENGINES = ["torch fp32", "torch bf16", "optimized fp32", "optimized bf16", "onnxruntime fp32"]
ENGINES += ["openvino fp32", "openvino bf16"]


def turn(engine: str, name: str, size: int, arguments: argparse.Namespace) -> None:
    """One engine's passes through a network of each mechanism at a size, in turn; a JSON line for each."""
    import torch

    from subquad.errors import reason_of
    from subquad.timing import interleaved_ms, warmed_up

    torch.set_num_threads(arguments.threads)
    entries: dict[str, Entry] = {}
    passes: dict[str, Callable[[], Any]] = {}
    for attention in arguments.attention:
        entry = entries[attention] = {"network": name, "attention": attention, "px": size, "engine": engine}
        try:
            path = file_of(arguments.folder, name, attention, size)
            if engine.startswith("onnxruntime"):
                run = by_onnxruntime(path, size, arguments.threads)
            elif engine.startswith("openvino"):
                run = by_openvino(path, size, arguments.threads, engine)
            else:
                model = network(name, attention, size)
                entry["ceiling"] = ceiling_of(model, size)
                run = by_torch(model, size, engine)
            warmed_up({attention: run}, torch.device("cpu"))
            passes[attention] = run
        except Exception as error:  # whatever an engine says of what it can't compute here
            entry["error"] = reason_of(error)[:200]
    for attention, taken in interleaved_ms(passes, arguments.repeats, torch.device("cpu")).items():
        entries[attention]["ms"] = round(statistics.median(taken), 3)
    for entry in entries.values():
        print(json.dumps(entry), flush=True)


def ceiling_of(model: Any, size: int) -> float | None:
    """By counting products, how many times as fast a plain network is without attention: 1 + n/(6c)."""
    if not hasattr(model, "blocks"):
        return None
    patch = getattr(model, "patch_size", None) or model.patch_embed.patch_size[0]
    return 1 + (size // patch) ** 2 / (6 * model.num_features)


def export_all(arguments: argparse.Namespace) -> None:
    """Write the ONNX files that are missing, each by a process of its own."""
    for name, size, attention in cells(arguments):
        path = file_of(arguments.folder, name, attention, size)
        if not path.exists():
            only = ["--networks", name, "--img-size", str(size), "--attention", attention]
            subprocess.run([sys.executable, __file__, "--export-one", "--folder", arguments.folder, *only], check=False)
            print(path.name, "written" if path.exists() else "failed", flush=True)


def export_one(arguments: argparse.Namespace) -> None:
    """Write one ONNX file."""
    import subquad

    (name,), (attention,), (size,) = arguments.networks, arguments.attention, arguments.img_size
    path = file_of(arguments.folder, name, attention, size)
    subquad.export(network(name, attention, size), path, format="onnx", img_size=size)


def cells(arguments: argparse.Namespace) -> list[tuple[str, int, str]]:
    """Small sizes first."""
    sizes = sorted(arguments.img_size)
    return [(name, size, mixer) for size in sizes for name in arguments.networks for mixer in arguments.attention]


def measure(arguments: argparse.Namespace, kept: list[Entry], file: Path) -> None:
    """Rounds of all engines in turn."""
    flags = ["--attention", *arguments.attention, "--threads", str(arguments.threads), "--folder", arguments.folder]
    flags += ["--repeats", str(arguments.repeats)]
    for _ in range(arguments.rounds):
        for size in sorted(arguments.img_size):
            for name in arguments.networks:
                for engine in arguments.engines:
                    call = [sys.executable, __file__, "--turn", engine, "--networks", name, "--img-size", str(size)]
                    done = subprocess.run([*call, *flags], stdout=subprocess.PIPE, text=True, check=False)
                    kept += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
                    file.write_text(json.dumps(kept, indent=0))
                    print(size, name, engine, "done" if not done.returncode else "ended early", flush=True)


def table(kept: list[Entry]) -> str:
    """Medians in Markdown: a row for each mechanism, a table for each network and size."""
    text = []
    for name, size in dict.fromkeys((entry["network"], entry["px"]) for entry in kept):
        of_these = [entry for entry in kept if (entry["network"], entry["px"]) == (name, size) and "ms" in entry]
        engines = [engine for engine in ENGINES if any(entry["engine"] == engine for entry in of_these)]
        middle = functools.partial(median_of, of_these)
        softmax = min((ms for engine in engines if (ms := middle("softmax", engine))), default=None)
        most = next((entry["ceiling"] for entry in of_these if entry.get("ceiling")), None)
        ceiling = "" if most is None else f"; at most {most:.2f} times by counting products"
        text.append(f"\n{name}, {size} px{ceiling}\n")
        text.append("| | " + " | ".join(engines) + " | best softmax ÷ best |")
        text.append("|---" + "|---:" * (len(engines) + 1) + "|")
        for attention in dict.fromkeys(entry["attention"] for entry in of_these):
            times = [middle(attention, engine) for engine in engines]
            best = min(filter(None, times))
            gain = f"{softmax / best:.2f}" if softmax else ""
            text.append(f"| {attention} | " + " | ".join(map(shown, times)) + f" | {gain} |")
    return "\n".join(text)


def median_of(entries: list[Entry], attention: str, engine: str) -> float | None:
    """Of what was measured in all rounds."""
    found = [one["ms"] for one in entries if (one["attention"], one["engine"]) == (attention, engine)]
    return statistics.median(found) if found else None


def shown(ms: float | None) -> str:
    """Three digits."""
    return "" if ms is None else f"{ms:.1f}" if ms < 100 else f"{ms:,.0f}"


def main() -> None:
    """Export, measure, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = "timm/NAME, transformers/NAME of this file, or a name of ours"
    parser.add_argument("--networks", nargs="+", default=NETWORKS, help=named)
    parser.add_argument("--attention", nargs="+", default=MECHANISMS, help="'own' for what a network's name says")
    parser.add_argument("--img-size", type=int, nargs="+", default=[224, 448, 1024, 2044])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--folder", type=Path, default=Path("build/engines"), help="of the files and the times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=7, help="measured passes of a network in a round")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--export", action="store_true", help="write the ONNX files that are missing")
    parser.add_argument("--export-one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true", help="only print what is there")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.turn:
        turn(arguments.turn, *arguments.networks, *arguments.img_size, arguments)
    elif arguments.export_one:
        export_one(arguments)
    elif arguments.export:
        export_all(arguments)
    else:
        file = arguments.folder / "times.json"
        kept = json.loads(file.read_text()) if file.exists() else []
        if not arguments.table:
            measure(arguments, kept, file)
        print(table(kept))


if __name__ == "__main__":
    main()

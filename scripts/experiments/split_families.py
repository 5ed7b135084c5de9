#!/usr/bin/env python3
"""Try to split networks of torchvision's and timm's families into four modules.

Each is traced, cut where its modules are balanced, and run whole and in parts, in train and in eval
mode: outputs and gradients have to be equal. Needs torchvision and timm.

Usage: split_families.py [NAME ...]     names as torchvision:resnet18 or timm:vit_tiny_patch16_224
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from networks import vision
from torch import nn

from dni_runtime.errors import DniError
from dni_runtime.network.source import NetworkSpec, build_network
from dni_runtime.network.tracing import trace
from dni_runtime.spec import DataInfo, TensorSpec
from dni_runtime.split.network import take_apart
from dni_runtime.split.plan import SplitRequest

NAMES = (
    *(f"torchvision:{name}" for name in (
        "alexnet", "vgg11_bn", "resnet34", "resnext50_32x4d", "wide_resnet50_2", "densenet121",
        "squeezenet1_1", "mobilenet_v3_small", "efficientnet_b0", "efficientnet_v2_s",
        "shufflenet_v2_x1_0", "mnasnet1_0", "regnet_y_400mf", "convnext_tiny", "googlenet",
        "inception_v3", "vit_b_16", "swin_t", "swin_v2_t", "maxvit_t",
    )),
    *(f"timm:{name}" for name in (
        "vit_tiny_patch16_224", "deit_tiny_patch16_224", "mixer_s32_224", "resnet18",
        "convmixer_768_32", "swin_tiny_patch4_window7_224", "levit_128s", "efficientformer_l1",
        "poolformer_s12", "regnetx_002", "ghostnet_100", "xcit_nano_12_p16_224",
    )),
)  # fmt: skip


def build(name: str) -> nn.Module:
    """Return a network of ten classes."""
    family, _, name = name.partition(":")
    if family == "timm":
        import timm

        return timm.create_model(name, num_classes=10)  # type: ignore[no-any-return]
    given: dict[str, Any] = {"num_classes": 10}
    if name in ("googlenet", "inception_v3"):
        given |= {"aux_logits": False, "init_weights": False}
    return getattr(vision.models, name)(**given)  # type: ignore[no-any-return]


def attempt(name: str) -> str:
    """Split one; return what came of it."""
    size = 299 if "inception" in name else 224
    sample = TensorSpec(shape=(3, size, size), dtype="float32")
    document = {"import": f"{__name__}:build", "args": {"name": name}, "example": [sample]}
    began = time.monotonic()
    spec = NetworkSpec.model_validate(document)
    info = DataInfo(sample=sample, label=TensorSpec(shape=(), dtype="int64"), classes=10)
    try:
        program = trace(spec)
        traced = time.monotonic() - began
        cuts = {cut.position for cut in program.cuts.values() if cut.reason is None}
        parts = take_apart(
            spec, build_network(spec), info, SplitRequest(modules=4, batch_size=2, repeats=1)
        )
    except DniError as error:
        return f"FAILS: {str(error).splitlines()[0]}"
    shares = [part.seconds for part in parts]
    slowest = max(shares) / (sum(shares) / len(shares))
    links = sum(len(part.inputs or (1,)) for part in parts[1:])
    return (
        f"{len(cuts)} places, traced in {traced:.1f} s, slowest {slowest:.2f} of the mean, "
        f"{links} links, until {', '.join(str(part.until) for part in parts[:-1])}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    torch.manual_seed(0)
    failed = 0
    names = parser.parse_args().names
    for name in names:
        found = attempt(name)
        failed += found.startswith("FAILS")
        print(f"{name}: {found}", flush=True)
    print(f"{len(names) - failed} of {len(names)} work")


if __name__ == "__main__":
    sys.modules["split_families"] = sys.modules["__main__"]
    __name__ = "split_families"  # an import path that can be imported
    main()

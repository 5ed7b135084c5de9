#!/usr/bin/env python3
"""What a type on the wire costs: microseconds per MB of float32 to convert, each way.

What is timed is the link's own encoding and decoding, checks included, on one thread, without
sockets. Lower quartiles of repetitions that take turns: a busy machine disturbs them least. The
last column is the link speed below which sending less is worth the conversion: the bytes saved
over the time that both ends spend on top of float32's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import get_args

import torch

from dni_runtime.link.contract import LinkContract
from dni_runtime.link.tensors import from_buffers, to_buffers
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.spec import DataInfo, Dtype, TensorSpec, parse_chain
from dni_runtime.wire import TensorContract, nbytes

DTYPES = get_args(Dtype)
SHAPES = {
    "MLP": (256, 1024),
    "CNN": (128, 32, 14, 14),
    "tokens": (32, 64, 256),
}


CHAIN = """\
name: bench
data: {batch_size: %d, eval_batch_size: 1}
loss: MSELoss
metrics: []
links: {dtype: %s}
modules:
  - {name: source, interface: exact, layers: [Identity]}
  - {name: sink, layers: [Identity]}
"""


def contract(shape: tuple[int, ...], dtype: Dtype) -> TensorContract:
    """What a link of this type carries."""
    sample = TensorSpec(shape=shape[1:], dtype="float32")
    info = DataInfo(sample=sample, label=sample)
    source, _ = worker_specs(parse_chain(CHAIN % (shape[0], dtype)), info)
    return LinkContract.of(source, source.targets[0]).activation


def measure(shape: tuple[int, ...], repetitions: int) -> dict[str, tuple[float, float, int]]:
    """Microseconds to encode and to decode one tensor, and its bytes, by type."""
    x_BX = torch.randn(shape)
    contracts = {dtype: contract(shape, dtype) for dtype in DTYPES}
    taken: dict[str, list[tuple[float, float]]] = {dtype: [] for dtype in DTYPES}
    sizes = {}
    for _ in range(repetitions):
        for dtype in DTYPES:
            began_s = time.perf_counter()
            entries, buffers = to_buffers(x_BX, contracts[dtype])
            encoded_s = time.perf_counter()
            from_buffers(entries, buffers, "float32")
            decoded_s = time.perf_counter()
            taken[dtype].append((encoded_s - began_s, decoded_s - encoded_s))
            sizes[dtype] = sum(map(nbytes, buffers))
    result = {}
    for dtype, pairs in taken.items():
        encode_s, decode_s = (statistics.quantiles(one, n=4)[0] for one in zip(*pairs, strict=True))
        result[dtype] = (1e6 * encode_s, 1e6 * decode_s, sizes[dtype])
    return result


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="a line per shape and type instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.json:
        print("| batch | on the wire | bytes | out, us/MB | in, us/MB | pays off below, Gbit/s |")
        print("|---|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        measured = measure(shape, arguments.repetitions)
        plain_us = sum(measured["float32"][:2])
        plain_bytes = measured["float32"][2]
        for dtype, (out_us, in_us, size) in measured.items():
            megabytes = plain_bytes / 1e6
            saved, more_us = plain_bytes - size, out_us + in_us - plain_us
            gbit_s = saved * 8 / 1e3 / more_us if saved and more_us > 0 else None
            if arguments.json:
                values = {"out_us_per_mb": out_us / megabytes, "in_us_per_mb": in_us / megabytes}
                head = {"shape": shape, "dtype": dtype, "bytes": size}
                print(json.dumps({**head, **values, "pays_below_gbit_per_s": gbit_s}))
            else:
                pays = "" if gbit_s is None else f"{gbit_s:.0f}"
                print(
                    f"| {name} {' x '.join(map(str, shape))} | {dtype} | {size:,} "
                    f"| {out_us / megabytes:.0f} | {in_us / megabytes:.0f} | {pays} |"
                )


if __name__ == "__main__":
    main()

"""Let the trained model write: ``python generate.py --prompt 'def '``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
from lm import Embed
from torch import nn

import dni_runtime
from dni_runtime.errors import DniError


def generate(model: nn.Module, prompt: bytes, count: int, temperature: float) -> Iterator[int]:
    """Bytes that go on after a prompt.

    Args:
        model: From tokens (B, T) to scores of the next ones (B, T, 256).
        prompt: What it begins with, at least one byte.
        count: How many bytes to write.
        temperature: 1 draws by the model's probabilities, less by the higher ones; 0 always takes
            the highest.
    """
    context = next(m for m in model.modules() if isinstance(m, Embed)).positions.shape[0]
    text = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            scores_V = model(torch.tensor([text[-context:]]))[0, -1]
        if temperature:
            token = int(torch.multinomial((scores_V / temperature).softmax(-1), 1))
        else:
            token = int(scores_V.argmax())
        text.append(token)
        yield token


def main() -> None:
    """Write to stdout, byte by byte."""
    parser = argparse.ArgumentParser(description="Let the trained model write.")
    parser.add_argument("model", nargs="?", default="model.safetensors", help="(%(default)s)")
    parser.add_argument("--prompt", default="def ", help="what it begins with (%(default)r)")
    parser.add_argument("--bytes", type=int, default=500, help="how many to write (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="(%(default)s)")
    parser.add_argument("--seed", type=int, help="write the same again")
    given = parser.parse_args()
    prompt = given.prompt.encode()
    if not prompt or given.temperature < 0:
        parser.error("it needs a prompt, and a temperature of 0 or more")
    torch.set_num_threads(1)  # one sample of a small model: more threads only wait for each other
    if given.seed is not None:
        torch.manual_seed(given.seed)
    try:
        model = dni_runtime.load(given.model, trust=True)  # its layers are lm.py's
    except DniError as error:
        sys.exit(f"generate.py: {error}")
    sys.stdout.buffer.write(prompt)
    for token in generate(model, prompt, given.bytes, given.temperature):
        sys.stdout.buffer.write(bytes([token]))
        sys.stdout.buffer.flush()
    sys.stdout.buffer.write(b"\n")


if __name__ == "__main__":
    main()

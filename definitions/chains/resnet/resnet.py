"""A small residual network (He et al. 2016, arXiv:1512.03385)."""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions beside a shortcut.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        stride: Of the first convolution.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1, self.relu = nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = (
            nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out: Tensor = self.relu(y + self.shortcut(x))
        return out


class ResNet(nn.Module):
    """Three stages of two blocks.

    Args:
        channels: Channels of the images.
        classes: Classes.
        width: Channels of the first stage.
    """

    def __init__(self, channels: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        self.stages = nn.Sequential(
            *(nn.Sequential(Block(a, b, stride), Block(b, b)) for a, b, stride in sizes)
        )
        self.top = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stages(self.relu(self.norm(self.conv(x))))
        scores: Tensor = self.top(h.mean((2, 3)))
        return scores

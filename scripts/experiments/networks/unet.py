"""A small U-Net (Ronneberger et al. 2015, arXiv:1505.04597)."""

import torch
from torch import Tensor, nn


def _block(ins: int, outs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(ins, outs, 3, padding=1),
        nn.BatchNorm2d(outs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outs, outs, 3, padding=1),
        nn.BatchNorm2d(outs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = _block(3, 16), _block(16, 32), _block(32, 64)
        self.up2, self.up1 = _block(64 + 32, 32), _block(32 + 16, 16)
        self.pool, self.grow = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        y = self.grow(self.bottom(self.pool(second)))
        y = self.grow(self.up2(torch.cat([y, second], 1)))
        y = self.up1(torch.cat([y, first], 1))
        return torch.sigmoid(self.out(y))


def build() -> nn.Module:
    return UNet()

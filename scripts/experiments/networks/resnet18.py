"""torchvision's ResNet-18 (He et al. 2016, arXiv:1512.03385)."""

from torch import nn

from networks.vision import models


def build() -> nn.Module:
    return models.resnet18(num_classes=10)

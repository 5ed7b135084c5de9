"""A small vision transformer of torchvision's (Dosovitskiy et al. 2021, arXiv:2010.11929)."""

from torch import nn

from networks.vision import models


def build() -> nn.Module:
    return models.VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=4,
        num_heads=4,
        hidden_dim=64,
        mlp_dim=128,
        num_classes=10,
    )

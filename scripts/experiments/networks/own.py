"""Networks in the shapes that people write themselves."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
    """A small U-Net (Ronneberger et al. 2015, arXiv:1505.04597)."""

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


class Siamese(nn.Module):
    """One network for two images, and their distance (Bromley et al. 1993)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(_block(3, 8), nn.MaxPool2d(4), _block(8, 16), nn.MaxPool2d(4))
        self.embed, self.head = (
            nn.Linear(64, 16),
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)),
        )

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        first, second = (self.embed(self.body(x).flatten(1)) for x in (a, b))
        return self.head((first - second).abs())


class GraphNetwork(nn.Module):
    """Graph convolutions with a weighted adjacency (Kipf & Welling 2017, arXiv:1609.02907)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((8, 32), (32, 32), (32, 32)))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        edges = (edges + edges.transpose(1, 2)).sigmoid()
        edges = edges / edges.sum(-1, keepdim=True)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            nodes = norm(F.relu(layer(edges @ nodes)))
        return self.head(nodes.mean(1))


class SequenceToSequence(nn.Module):
    """Two LSTMs, the second with attention (Luong et al. 2015, arXiv:1508.04025)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 24)
        self.encoder = nn.LSTM(24, 24, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTM(24, 48, batch_first=True)
        self.mix, self.head = nn.Linear(96, 48), nn.Linear(48, 100)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, _ = self.encoder(self.embed(source))
        found, _ = self.decoder(self.embed(target))
        weights = (found @ memory.transpose(1, 2)).softmax(-1)
        return self.head(self.mix(torch.cat([found, weights @ memory], -1)).tanh())


class Autoencoder(nn.Module):
    """What it reads, its code, and what the code predicts: the losses take what they want."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 32), nn.ELU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ELU(), nn.Linear(32, 20))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        code = self.encoder(x)
        return self.decoder(code), {"code": code, "norm": code.square().sum(1)}


class TwoTowers(nn.Module):
    """A user and what they have seen, by sparse tables of two towers (Yi et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(100, 16), nn.EmbeddingBag(100, 16)
        self.left = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.right = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, user: Tensor, seen: Tensor) -> Tensor:
        left, right = self.left(self.users(user)), self.right(self.items(seen))
        return (F.normalize(left, dim=1) * F.normalize(right, dim=1)).sum(1, keepdim=True) / 0.1


class CodebookAutoencoder(nn.Module):
    """A codebook learnt by running means (van den Oord et al. 2017, arXiv:1711.00937, A.1)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 20))
        self.register_buffer("book", torch.randn(16, 8))
        self.register_buffer("count", torch.ones(16))
        self.register_buffer("total", self.book.clone())

    def forward(self, x: Tensor) -> Tensor:
        code = self.encoder(x)
        nearest = F.one_hot(torch.cdist(code, self.book).argmin(-1), 16).to(code.dtype)
        found = nearest @ self.book
        if self.training:
            with torch.no_grad():
                self.count.mul_(0.9).add_(nearest.sum(0), alpha=0.1)
                self.total.mul_(0.9).add_(nearest.t() @ code, alpha=0.1)
                self.book.copy_(self.total / self.count.clamp(min=1e-3).unsqueeze(1))
        return self.decoder(code + (found - code).detach())


class Perceiver(nn.Module):
    """A few learnt queries read the input by attention (Jaegle et al. 2021, arXiv:2103.03206)."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(4, 16) / 4)
        self.embed = nn.Linear(8, 16)
        self.read = nn.MultiheadAttention(16, 2, batch_first=True)
        self.think = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        queries = self.queries.expand(x.shape[0], -1, -1)
        return self.head(self.think(queries + self.read(queries, x, x)[0]).mean(1))


class SpectralCritic(nn.Module):
    """Convolutions of bounded gain (Miyato et al. 2018, arXiv:1802.05957)."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.body = nn.Sequential(
            norm(nn.Conv2d(3, 8, 4, 2, 1)), nn.LeakyReLU(0.2),
            norm(nn.Conv2d(8, 16, 4, 2, 1)), nn.LeakyReLU(0.2),
            norm(nn.Conv2d(16, 16, 4, 2, 1)), nn.LeakyReLU(0.2),
        )  # fmt: skip
        self.head = norm(nn.Linear(256, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


class SoftExperts(nn.Module):
    """All experts answer, a gate weighs them (Jacobs et al. 1991)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(20, 32), nn.Tanh())
        self.gate = nn.Linear(32, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        answers = torch.stack([expert(x) for expert in self.experts], 1)
        return self.head((self.gate(x).softmax(-1).unsqueeze(-1) * answers).sum(1))


def whisper_encoder() -> nn.Module:
    """Whisper's encoder (Radford et al. 2022, arXiv:2212.04356)."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return WhisperEncoder(
        WhisperConfig(
            num_mel_bins=16,
            d_model=32,
            encoder_layers=3,
            encoder_attention_heads=4,
            encoder_ffn_dim=64,
            max_source_positions=32,
        )
    )


def dense_net() -> nn.Module:
    """timm's DenseNet (Huang et al. 2017, arXiv:1608.06993), with short blocks."""
    from timm.models.densenet import DenseNet

    return DenseNet(growth_rate=8, block_config=(2, 3, 3, 2), num_classes=10)


def res_next() -> nn.Module:
    """timm's ResNeXt (Xie et al. 2017, arXiv:1611.05431), with one block a stage."""
    from timm.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, (1, 1, 1, 1), num_classes=10, cardinality=8, base_width=4)


def res2_net() -> nn.Module:
    """timm's Res2Net (Gao et al. 2019, arXiv:1904.01169), with one block a stage."""
    from timm.models.res2net import Bottle2neck
    from timm.models.resnet import ResNet

    return ResNet(Bottle2neck, (1, 1, 1, 1), num_classes=10, base_width=8, block_args={"scale": 4})


def eca_net() -> nn.Module:
    """timm's ResNet with channel attention (Wang et al. 2020, arXiv:1910.03151)."""
    from timm.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, (1, 1, 1, 1), num_classes=10, block_args={"attn_layer": "eca"})

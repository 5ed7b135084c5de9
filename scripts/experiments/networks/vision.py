"""torchvision's models, also where its compiled operations do not fit this torch.

The models here use none of them; importing torchvision needs two to be declared.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from torchvision import models  # noqa: E402

__all__ = ["models"]

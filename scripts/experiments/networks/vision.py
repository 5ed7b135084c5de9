"""torchvision's models, also where its compiled operations do not fit this torch.

The models here use none of them; importing torchvision needs two to be declared.
"""

from __future__ import annotations

import sys

import torch

try:
    from torchvision import models
except RuntimeError:
    for _name in [one for one in sys.modules if one.partition(".")[0] == "torchvision"]:
        del sys.modules[_name]
    _LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from torchvision import models

__all__ = ["models"]

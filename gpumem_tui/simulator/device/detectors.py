"""Which boxes and anchors detectors keep, where only what their networks predict tells: as many as there can be."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Literal, NamedTuple

from gpumem_tui.step.sites import callers, is_own

_LIBRARIES = ("detectron2.", "mmdet.", "torchvision.models.detection.", "torchvision.ops.", "ultralytics.")
_PASSING_ON = "detectron2.layers.wrappers"
_EACH_OBJECT, _HALVES = 0.0, -1.0
_SHARES = {
    ("torchvision.models.detection._utils", "set_low_quality_matches_"): _EACH_OBJECT,
    ("detectron2.modeling.matcher", "set_low_quality_matches_"): _EACH_OBJECT,
    ("torchvision.models.detection._utils", "__call__"): _HALVES,
    ("detectron2.modeling.sampling", "subsample_labels"): _HALVES,
    ("mmdet.models.task_modules.samplers", "_sample_pos"): _HALVES,
    ("mmdet.models.task_modules.samplers", "_sample_neg"): _HALVES,
    ("torchvision.ops.poolers", ""): 1 / 4,
    ("detectron2.modeling.poolers", ""): 1 / 4,
    ("mmdet.models.roi_heads.roi_extractors", ""): 1 / 4,
    ("torchvision.models.detection.roi_heads", "forward"): 1 / 4,
    ("torchvision.models.detection.roi_heads", "fastrcnn_loss"): 1 / 4,
    ("detectron2.modeling.roi_heads.roi_heads", "select_foreground_proposals"): 1 / 4,
    ("detectron2.modeling.roi_heads.fast_rcnn", "box_reg_loss"): 1 / 4,
}
"""By module (its beginning) and function ("" for every one) the share that is kept; elsewhere all. Each object has one
best anchor. Samplers ask for what is on objects, then for the rest: half each suffices for either. A pyramid has
four levels; of what was sampled for the second stage a quarter is on objects at most (`POSITIVE_FRACTION`)."""


class Kept(NamedTuple):
    """A share of the rows, evenly spread or the `first` or `last` ones, of a detector of `library`."""

    share: float
    where: Literal["evenly", "first", "last"] = "evenly"
    library: str = ""


class Detectors:
    """Knows which rows detectors keep."""

    def __init__(self) -> None:
        self._in_first_half = False

    def kept(self, shape: tuple[int, ...]) -> Kept | None:
        """Return what is kept of something of this shape; None where the program's code that asks is no detector's."""
        own = (frame for frame in callers(sys._getframe(1)) if is_own(frame.f_code.co_filename))
        frame = next((frame for frame in own if _module(frame) != _PASSING_ON), None)
        module = "" if frame is None else _module(frame)
        if frame is None or not module.startswith(_LIBRARIES):
            return None
        function, library = frame.f_code.co_name, module.partition(".")[0]
        share = next((s for (m, f), s in _SHARES.items() if module.startswith(m) and f in ("", function)), 1.0)
        if share == _EACH_OBJECT:
            return Kept(1 / max(1, shape[-1]), library=library)
        if share == _HALVES:
            self._in_first_half = not self._in_first_half
            return Kept(0.5, "first" if self._in_first_half else "last", library=library)
        return Kept(share, library=library)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))

"""The model: attention, masks, padding policies, encoder, decoder, virtual padding, int8."""

from typing import TYPE_CHECKING

from asrmask.lazy import lazy_exports

if TYPE_CHECKING:
    from asrmask.model.dimensions import ModelDimensions as ModelDimensions
    from asrmask.model.policy import Policy as Policy
    from asrmask.model.whisper import Whisper as Whisper

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "dimensions": "ModelDimensions",
        "policy": "Policy",
        "whisper": "Whisper",
    },
)

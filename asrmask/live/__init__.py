"""Live transcription: text while people speak."""

from typing import TYPE_CHECKING

from asrmask.lazy import lazy_exports

if TYPE_CHECKING:
    from asrmask.live.api import LiveTranscriber as LiveTranscriber
    from asrmask.live.api import listen as listen
    from asrmask.live.api import push_all as push_all
    from asrmask.live.commitment import AttentionGuided as AttentionGuided
    from asrmask.live.commitment import LocalAgreement as LocalAgreement
    from asrmask.live.events import Committed as Committed
    from asrmask.live.events import Endpoint as Endpoint
    from asrmask.live.events import Partial as Partial
    from asrmask.live.settings import LiveSettings as LiveSettings
    from asrmask.live.transcript import Transcript as Transcript

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "api": "LiveTranscriber listen push_all",
        "commitment": "AttentionGuided LocalAgreement",
        "events": "Committed Endpoint Partial",
        "settings": "LiveSettings",
        "transcript": "Transcript",
    },
)

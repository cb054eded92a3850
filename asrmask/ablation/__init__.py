"""Ablation experiments: measure how Whisper depends on its padding."""

import sys

from asrmask.extras import require

require(__name__, "matplotlib", "jinja2", "jiwer")
if sys.version_info < (3, 11):
    require(__name__, "tomli")

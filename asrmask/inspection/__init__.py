"""Measurements inside the model, over real positions only: attention on padding, and more."""

from asrmask.extras import require

require(__name__, "matplotlib", "jinja2", "pyarrow", "scipy")

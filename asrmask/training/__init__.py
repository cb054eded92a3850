"""Training under padding masks: spec → examples → steps → adapter, curves and a page."""

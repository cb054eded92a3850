"""Instruments: what is measured inside the model, counted over real positions only."""

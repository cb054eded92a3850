"""White noise at a given level."""

import numpy as np


def white_noise(rng: np.random.Generator, n: int, level_db: float) -> np.ndarray:
    """Return n float32 samples of white noise with an RMS of level_db dBFS."""
    return rng.standard_normal(n, np.float32) * np.float32(10 ** (level_db / 20))

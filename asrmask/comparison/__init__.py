"""asrmask beside other systems, with the same weights: stages, tokens, times and text."""

"""Speed, memory and WER of speech-to-text systems on the same clips, with the same weights."""

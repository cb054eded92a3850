"""Constants of Whisper's front end: rates, window, frames and encoder positions."""

SAMPLE_RATE = 16_000  # samples per second
N_FFT = 400  # samples per frame: 25 ms
HOP_LENGTH = 160  # samples between frames: 10 ms
FRAMES_PER_SECOND = SAMPLE_RATE // HOP_LENGTH  # 100
CHUNK_LENGTH = 30  # seconds per window, the model's input length
N_SAMPLES = CHUNK_LENGTH * SAMPLE_RATE  # 480,000 samples per window
N_FRAMES = N_SAMPLES // HOP_LENGTH  # 3,000 frames per window
FRAMES_PER_POSITION = 2  # the encoder's second convolution has stride 2
POSITIONS_PER_SECOND = 50  # encoder output rate
N_POSITIONS = CHUNK_LENGTH * POSITIONS_PER_SECOND  # 1,500 encoder positions per window

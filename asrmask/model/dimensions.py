"""Model dimensions: the sizes that define a Whisper architecture."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from asrmask.errors import CheckpointError, brief

N_ENGLISH_VOCAB = 51_864  # vocabulary of an English model; multilingual ones have more
N_WITHOUT_LANGUAGES = 51_765  # tokens other than languages; one more in multilingual models


@dataclass(frozen=True)
class ModelDimensions:
    """The ten sizes that define a Whisper architecture, in OpenAI's names."""

    n_mels: int
    n_audio_ctx: int  # encoder positions per window, 50 per second
    n_audio_state: int
    n_audio_head: int
    n_audio_layer: int
    n_vocab: int
    n_text_ctx: int
    n_text_state: int
    n_text_head: int
    n_text_layer: int

    @classmethod
    def of(cls, numbers: Mapping[str, Any]) -> "ModelDimensions":
        """Build dimensions from a checkpoint's table and check them."""
        names = [field.name for field in fields(cls)]
        if set(numbers) != set(names):
            raise CheckpointError(f"dimensions must be {names}, got {brief(list(numbers))}")
        bad = {n: x for n, x in numbers.items() if type(x) is not int or not 0 < x < 2**31}
        if bad:
            raise CheckpointError(
                f"dimensions must be positive whole numbers below 2^31, got {brief(bad)}"
            )
        dims = cls(**numbers)
        if dims.n_audio_state % 2 or dims.n_audio_state < 4:  # required by sinusoids
            raise CheckpointError(f"widths must be even and 4 or more, got {dims}")
        if dims.n_audio_state % dims.n_audio_head or dims.n_text_state % dims.n_text_head:
            raise CheckpointError(f"widths must be multiples of their head counts, got {dims}")
        if dims.n_audio_state != dims.n_text_state:
            raise CheckpointError(f"encoder and decoder must be equally wide, got {dims}")
        return dims

    @property
    def is_multilingual(self) -> bool:
        return self.n_vocab > N_ENGLISH_VOCAB

    @property
    def num_languages(self) -> int:
        """Number of language tokens in the vocabulary; English models have 99 of them too."""
        return self.n_vocab - N_WITHOUT_LANGUAGES - int(self.is_multilingual)

    @property
    def default_alignment_heads(self) -> tuple[tuple[int, int], ...]:
        """(layer, head) of the upper half of the decoder, for models without their own list."""
        return tuple(
            (layer, head)
            for layer in range(self.n_text_layer // 2, self.n_text_layer)
            for head in range(self.n_text_head)
        )

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

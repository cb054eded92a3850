"""The decoder's self-attention cache."""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class KVCache:
    """Keys and values of the text decoded so far. Each decoder call returns a new KVCache.

    keys, values: one tensor per layer, (B, H, capacity, d); the first `length` positions are filled

    Old and new caches share memory, so only the newest is valid.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    length: int = 0

    @classmethod
    def empty(cls, n_layer: int, shape: tuple[int, int, int, int], like: Tensor) -> "KVCache":
        """Allocate an empty cache: n_layer layers of shape = (B, H, capacity, d)."""
        keys = tuple(like.new_empty(shape) for _ in range(n_layer))
        values = tuple(like.new_empty(shape) for _ in range(n_layer))
        return cls(keys, values)

    @property
    def n_rows(self) -> int:
        return self.keys[0].shape[0]

    def ensure_capacity(self, n: int) -> "KVCache":
        """Ensure capacity for n more positions: self, or a copy of at least twice the capacity."""
        capacity = self.keys[0].shape[2]
        if self.length + n <= capacity:
            return self

        def grown(buffer: Tensor) -> Tensor:
            n_rows, n_head, _, width = buffer.shape
            larger = buffer.new_empty(n_rows, n_head, max(2 * capacity, self.length + n), width)
            larger[:, :, : self.length] = buffer[:, :, : self.length]
            return larger

        return KVCache(tuple(map(grown, self.keys)), tuple(map(grown, self.values)), self.length)

    def put(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write (B, H, Q, d) keys and values of new positions; return all of the layer."""
        end = self.length + keys.shape[2]
        self.keys[layer][:, :, self.length : end] = keys
        self.values[layer][:, :, self.length : end] = values
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def advanced(self, n: int) -> "KVCache":
        """Return the cache with n more positions, after `put` for every layer."""
        return replace(self, length=self.length + n)

    def select(self, rows: Tensor) -> "KVCache":
        """Make row i a copy of row rows[i], to reorder beams or drop finished clips."""

        def moved(buffer: Tensor) -> Tensor:
            filled = buffer[:, :, : self.length].index_select(0, rows)
            if len(rows) > len(buffer):
                buffer = buffer.new_empty(len(rows), *buffer.shape[1:])
            buffer[: len(rows), :, : self.length] = filled
            return buffer[: len(rows)]

        return KVCache(tuple(map(moved, self.keys)), tuple(map(moved, self.values)), self.length)

"""Record inside other projects' models with PyTorch hooks, without changing their code."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from asrmask.inspection.inspected_model import to_heads
from asrmask.model.attention import Recorder

# Called with an attention module's output and its recorded projections and keyword arguments;
# returns scores and weights, both (B, H, Q, K).
Found = Callable[[Any, dict[str, Any]], tuple[Tensor, Tensor]]


@contextmanager
def recorded(
    layers: Sequence[nn.Module],
    part: str,
    attentions: dict[str, str],
    projections: dict[str, str],
    n_head: int,
    found: Found,
    record: Recorder | None,
) -> Iterator[None]:
    """Context in which the layers report what they compute to `record`, unless it is None.

    part:        "encoder" or "decoder"
    attentions:  "self" or "cross" → attribute name in a layer
    projections: "query", "key", "value", "out" → attribute names in an attention module
    found:       computes scores and weights
    """
    if record is None:
        yield
        return
    with ExitStack() as stack:

        def hold(handle: Any) -> None:
            stack.callback(handle.remove)

        def before_first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            record(f"{part}.input", "residual", args[0] if args else kwargs["hidden_states"])

        hold(layers[0].register_forward_pre_hook(before_first, with_kwargs=True))
        for i, layer in enumerate(layers):
            for what, name in attentions.items():
                attention = getattr(layer, name)
                place = f"{part}.{i}.{what}"
                for handle in _attention(attention, place, projections, n_head, found, record):
                    hold(handle)

            def after(
                module: nn.Module, args: Any, output: Any, place: str = f"{part}.{i}"
            ) -> None:
                record(place, "residual", output[0] if isinstance(output, tuple) else output)

            hold(layer.register_forward_hook(after))
        yield


def _attention(
    attention: nn.Module,
    place: str,
    projections: dict[str, str],
    n_head: int,
    found: Found,
    record: Recorder,
) -> Iterator[Any]:
    scratch: dict[str, Any] = {}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scratch.update(kwargs)

    def projected(name: str) -> Callable[..., None]:
        return lambda module, args, output: scratch.update({name: to_heads(output, n_head)})

    def joined(module: nn.Module, args: tuple[Any, ...]) -> None:
        scratch["outputs"] = to_heads(args[0], n_head)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        scores, weights = found(output, scratch)
        record(place, "scores", scores)
        record(place, "weights", weights)
        record(place, "values", scratch["value"])
        record(place, "outputs", scratch["outputs"])
        scratch.clear()

    yield attention.register_forward_pre_hook(before, with_kwargs=True)
    for name in ("query", "key", "value"):
        yield getattr(attention, projections[name]).register_forward_hook(projected(name))
    yield getattr(attention, projections["out"]).register_forward_pre_hook(joined)
    yield attention.register_forward_hook(after)

"""Recording in other projects' modules, by PyTorch's hooks: their code runs, ours listens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from asrmask.attention import Recorder
from asrmask.instruments.subject import to_heads

# from an attention's output and the scratch of its projections to scores and weights, (B, H, Q, K)
Found = Callable[[Any, dict[str, Any]], tuple[Tensor, Tensor]]


@contextmanager
def recorded(
    layers: Sequence[nn.Module],
    part: str,
    attentions: dict[str, str],
    projections: dict[str, str],
    n_head: int,
    found: Found,
    record: Recorder,
) -> Iterator[None]:
    """While this lasts, what those layers compute is handed to `record`.

    part:        "encoder" or "decoder"
    attentions:  "self" or "cross" → the attention's name in a layer
    projections: "query", "key", "value", "out" → their names in an attention
    """
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

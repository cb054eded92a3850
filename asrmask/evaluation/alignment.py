"""Align two texts word by word and mark the differences, for HTML or a terminal."""

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass

TEXT = {
    "equal": "{hypothesis}",
    "substitute": "[{reference} → {hypothesis}]",
    "insert": "[+ {hypothesis}]",
    "delete": "[− {reference}]",
}
HTML = {
    "equal": "{hypothesis}",
    "substitute": '<mark title="{reference}">{hypothesis}</mark>',
    "insert": "<ins>{hypothesis}</ins>",
    "delete": "<del>{reference}</del>",
}
HTML_BOTH = HTML | {"substitute": "<del>{reference}</del> " + HTML["substitute"]}


@dataclass(frozen=True)
class Chunk:
    """Consecutive words that are equal in both texts, or that differ."""

    kind: str  # "equal", "substitute", "insert" (only in the hypothesis) or "delete"
    reference: str
    hypothesis: str


def align(reference: str, hypothesis: str) -> list[Chunk]:
    """Return the minimal edits from reference to hypothesis, in order.

    >>> [(c.kind, c.reference, c.hypothesis) for c in align("a b c", "a x c d")]
    [('equal', 'a', 'a'), ('substitute', 'b', 'x'), ('equal', 'c', 'c'), ('insert', '', 'd')]
    """
    import jiwer

    ref, hyp = reference.split(), hypothesis.split()
    if not ref or not hyp:
        kind = "insert" if hyp else "delete"
        return [Chunk(kind, " ".join(ref), " ".join(hyp))] if ref or hyp else []
    return [
        Chunk(
            chunk.type,
            " ".join(ref[chunk.ref_start_idx : chunk.ref_end_idx]),
            " ".join(hyp[chunk.hyp_start_idx : chunk.hyp_end_idx]),
        )
        for chunk in jiwer.process_words(" ".join(ref), " ".join(hyp)).alignments[0]
    ]


def n_different(reference: str, hypothesis: str) -> int:
    """Count the words that are substituted, inserted or deleted."""
    return sum(
        max(len(chunk.reference.split()), len(chunk.hypothesis.split()))
        for chunk in align(reference, hypothesis)
        if chunk.kind != "equal"
    )


def as_html(reference: str, hypothesis: str, *, both: bool = False) -> str:
    """Return the hypothesis as HTML, with differences marked.

    both: show the reference words before those that replace them
    """
    if not hypothesis.split():
        return "<i>nothing</i>"
    return _format(reference, hypothesis, HTML_BOTH if both else HTML, html.escape)


def as_text(reference: str, hypothesis: str) -> str:
    """Return the hypothesis with differences in brackets.

    >>> as_text("a b c e", "a x c d e")
    'a [b → x] c [+ d] e'
    """
    return _format(reference, hypothesis, TEXT, str)


def _format(
    reference: str, hypothesis: str, formats: Mapping[str, str], escape: Callable[[str], str]
) -> str:
    return " ".join(
        formats[c.kind].format(reference=escape(c.reference), hypothesis=escape(c.hypothesis))
        for c in align(reference, hypothesis)
    )

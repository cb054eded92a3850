"""Align two texts word by word and mark the differences, for HTML or a terminal."""

import html
from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """Consecutive words that are equal in both texts, or that differ."""

    kind: str  # "equal", "substitute", "insert" (only in `heard`) or "delete" (only in `said`)
    said: str  # the words of the reference
    heard: str  # the words of the hypothesis


def aligned(said: str, heard: str) -> list[Chunk]:
    """Return the minimal edits from reference (`said`) to hypothesis (`heard`), in order.

    >>> [(c.kind, c.said, c.heard) for c in aligned("a b c", "a x c d")]
    [('equal', 'a', 'a'), ('substitute', 'b', 'x'), ('equal', 'c', 'c'), ('insert', '', 'd')]
    """
    import jiwer

    expected, words = said.split(), heard.split()
    if not expected or not words:
        kind = "insert" if words else "delete"
        return [Chunk(kind, " ".join(expected), " ".join(words))] if expected or words else []
    return [
        Chunk(
            chunk.type,
            " ".join(expected[chunk.ref_start_idx : chunk.ref_end_idx]),
            " ".join(words[chunk.hyp_start_idx : chunk.hyp_end_idx]),
        )
        for chunk in jiwer.process_words(" ".join(expected), " ".join(words)).alignments[0]
    ]


def n_different(said: str, heard: str) -> int:
    """Count the words that are substituted, inserted or deleted."""
    return sum(
        max(len(chunk.said.split()), len(chunk.heard.split()))
        for chunk in aligned(said, heard)
        if chunk.kind != "equal"
    )


def as_html(said: str, heard: str, *, both: bool = False) -> str:
    """Return the hypothesis (`heard`) as HTML, with differences marked.

    both: show the reference words before those that replace them
    """
    if not heard.split():
        return "<i>nothing</i>"
    parts = []
    for chunk in aligned(said, heard):
        mine, theirs = html.escape(chunk.heard), html.escape(chunk.said)
        instead = f'<mark title="{theirs}">{mine}</mark>'
        parts.append(
            {
                "equal": mine,
                "substitute": f"<del>{theirs}</del> {instead}" if both else instead,
                "insert": f"<ins>{mine}</ins>",
                "delete": f"<del>{theirs}</del>",
            }[chunk.kind]
        )
    return " ".join(parts)


def as_text(said: str, heard: str) -> str:
    """Return the hypothesis (`heard`) with differences in brackets.

    >>> as_text("a b c e", "a x c d e")
    'a [b → x] c [+ d] e'
    """
    parts = []
    for chunk in aligned(said, heard):
        parts.append(
            {
                "equal": chunk.heard,
                "substitute": f"[{chunk.said} → {chunk.heard}]",
                "insert": f"[+ {chunk.heard}]",
                "delete": f"[− {chunk.said}]",
            }[chunk.kind]
        )
    return " ".join(parts)

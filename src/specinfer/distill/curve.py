"""The course of a training as a picture: plain SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, MARGIN = 640, 320, 44
COLOURS = {"top1": "#1b6ca8", "top2": "#4aa3df", "top3": "#8cc6ee", "top4": "#b9def7", "loss": "#c0392b"}


def curve(history: Sequence[Mapping[str, float]]) -> str:
    """Hits on the validation on the left axis (0 to 1), the loss in red on a scale of its own."""
    last = max((point["step"] for point in history), default=1.0)
    highest = max((point["loss"] for point in history), default=1.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.2f}</text>')
        loss = f'fill="{COLOURS["loss"]}">{share * highest:.1f}'
        parts.append(f'<text x="{WIDTH - MARGIN + 6}" y="{y + 4:.1f}" {loss}</text>')
    for i, (name, colour) in enumerate(COLOURS.items()):
        scale = highest if name == "loss" else 1.0
        points = " ".join(
            f"{MARGIN + point['step'] / last * (WIDTH - 2 * MARGIN):.1f},{_y(point[name] / scale):.1f}"
            for point in history
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{MARGIN + 60 * i}" y="16" fill="{colour}">{name}</text>')
    parts.append(f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 12}" text-anchor="end">step {last:.0f}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _y(share: float) -> float:
    return HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)

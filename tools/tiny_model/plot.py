"""Draw the loss curve of a training log as an SVG file, without a plotting library."""

import csv
import math
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 720, 320, 48
SERIES = (("chat_loss", "#1f77b4", "answers"), ("equation_loss", "#d95f02", "equations"))
LOWEST, HIGHEST = 0.05, 6.0


def plot_loss(log: Path, out: Path) -> None:
    """Write the losses of `log` (log.csv of a training run) over its steps to `out`, on a logarithmic scale."""
    with log.open() as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"log {log} has no lines")
    last_step = int(rows[-1]["step"])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        *(_gridline(value) for value in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)),
        *(_step_label(last_step * part // 4, last_step) for part in range(5)),
        *(_curve(rows, index, last_step) for index in range(len(SERIES))),
        "</svg>",
    ]
    out.write_text("\n".join(parts) + "\n")


def _x(step: int, last_step: int) -> float:
    return MARGIN + (WIDTH - 2 * MARGIN) * step / last_step


def _y(loss: float) -> float:
    share = math.log(min(max(loss, LOWEST), HIGHEST) / LOWEST) / math.log(HIGHEST / LOWEST)
    return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share


def _gridline(loss: float) -> str:
    y = _y(loss)
    return (
        f'<line x1="{MARGIN}" y1="{y:.1f}" x2="{WIDTH - MARGIN}" y2="{y:.1f}" stroke="#ddd"/>'
        f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:g}</text>'
    )


def _step_label(step: int, last_step: int) -> str:
    return f'<text x="{_x(step, last_step):.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{step}</text>'


def _curve(rows: list[dict[str, str]], index: int, last_step: int) -> str:
    column, colour, label = SERIES[index]
    # An empty sum of weights is logged as 0: no text of that kind was in those steps.
    points = [(int(row["step"]), float(row[column])) for row in rows if float(row[column]) > 0]
    path = " ".join(f"{_x(step, last_step):.1f},{_y(loss):.1f}" for step, loss in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}"/>'
        f'<text x="{WIDTH - MARGIN - 90}" y="{MARGIN + 18 * index}" fill="{colour}">{label}</text>'
    )

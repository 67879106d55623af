"""Draws the figures of `tensorfs bench --json` as SVG: `python tests/bench/chart.py FIGURES.json > CHART.svg`.

docs/img/speed.svg is drawn from docs/img/speed.json. New output of `tensorfs bench --json` can replace that file.
"""

import json
import sys
from html import escape

WIDTH, LEFT, BAR, CASE, TOP = 760, 130, 14, 42, 64
# The chart has its own background, because it is shown on light and on dark pages.
STYLE = """
    text { font: 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
    .title { font-size: 14px; font-weight: 600; }
    .card { fill: #ffffff; stroke: #d0d7de; }
    .mount { fill: #0969da; } .file { fill: #8c959f; } .range { stroke: #1f2328; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .card { fill: #0d1117; stroke: #30363d; }
      .mount { fill: #4493f8; } .file { fill: #6e7681; } .range { stroke: #e6edf3; }
    }
  """


def main():
    with open(sys.argv[1]) as file:
        figures = json.load(file)
    cases = [case for case in figures["cases"] if all(speed(case, side) for side in ("mount", "file"))]
    print(chart(cases, machine(figures["machine"])))


def chart(cases, about):
    most = max(largest(speed(case, side)) for case in cases for side in ("mount", "file"))
    scale = (WIDTH - LEFT - 110) / most
    height = TOP + CASE * len(cases) + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Speed of a mount beside the real file">',
        f"  <style>{STYLE}</style>",
        f'  <rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        '  <text class="title" x="24" y="30">Speed by access, GB/s</text>',
    ]
    for place, side, name in ((LEFT + 110, "mount", "mount"), (LEFT + 190, "file", "real file")):
        out.append(f'  <rect class="{side}" x="{place}" y="20" width="12" height="12"/>')
        out.append(f'  <text x="{place + 18}" y="30">{name}</text>')
    for number, case in enumerate(cases):
        top = TOP + CASE * number
        out.append(f'  <text x="24" y="{top + 18}">{escape(case["case"])}</text>')
        for row, side in enumerate(("mount", "file")):
            out += bar(speed(case, side), side, top + row * (BAR + 2), scale)
    out.append(f'  <text x="24" y="{height - 16}">{escape(about)}</text>')
    out.append("</svg>")
    return "\n".join(out)


def bar(spread, side, top, scale):
    median, end = spread["median"], LEFT + scale * largest(spread)
    lines = [f'  <rect class="{side}" x="{LEFT}" y="{top}" width="{scale * median:.1f}" height="{BAR}"/>']
    if "min" in spread:
        ends = [f"{LEFT + scale * spread[key]:.1f}" for key in ("min", "max")]
        lines.append(f'  <path class="range" d="M{ends[0]} {top + BAR / 2} H{ends[1]}"/>')
    lines.append(f'  <text x="{end + 6:.1f}" y="{top + 11}">{median:.2f}</text>')
    return lines


def speed(case, side):
    """The median and the range of the speed. None for a case that failed, or that counts operations in place of
    bytes."""
    return case[side].get("gb_per_s")


def largest(spread):
    return spread.get("max", spread["median"])


def machine(about):
    """The machine as a text. `tensorfs bench` writes facts about it, and docs/img/speed.json has a sentence."""
    return about if isinstance(about, str) else f"{about['cores']} cores, Linux {about['kernel']}"


if __name__ == "__main__":
    main()

"""Sections of tables and figures, written as Markdown, CSV and one HTML page."""

import base64
import csv
import html
import re
from pathlib import Path
from typing import NamedTuple

NOT_MEASURED = "not measured"
NOT_BUILT = "not built here"
OURS = "here: "  # how columns of our own measurements begin among those of others


class Number(NamedTuple):
    """A number to show, with its interval where there is one, and a mark behind it."""

    value: float
    low: float | None = None
    high: float | None = None
    spec: str = ".2f"
    mark: str = ""


Cell = Number | str


class Table(NamedTuple):
    """One table.

    Args:
      name: of its CSV file.
      title: above it, "" where the section has no other block.
      n_keys: leading columns that name a row.
      ours: rows that hold our measurements among those of others.
      notes: what the columns mean, printed below.
    """

    name: str
    title: str
    columns: list[str]
    rows: list[list[Cell]]
    notes: list[str]
    n_keys: int = 1
    ours: frozenset[int] = frozenset()


class Picture(NamedTuple):
    """A PNG file in the report's folder."""

    file: str
    caption: str


class Section(NamedTuple):
    level: int
    title: str
    blocks: list[str | Table | Picture]


def text(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell.replace("\n", " ")
    shown = format(cell.value, cell.spec) + cell.mark
    return f"{shown} {interval(cell)}".rstrip()


def interval(cell: Number) -> str:
    if cell.low is None or cell.high is None:
        return ""
    return f"[{cell.low:{cell.spec}}, {cell.high:{cell.spec}}]"


def write_csv(folder: Path, table: Table) -> None:
    """Writes unrounded numbers; intervals get columns of their own."""
    spread = [False] * len(table.columns)
    for row in table.rows:
        for i, cell in enumerate(row):
            spread[i] |= isinstance(cell, Number) and bool(interval(cell))
    header = []
    for name, wide in zip(table.columns, spread, strict=True):
        header += [name, f"{name} low", f"{name} high"] if wide else [name]
    with (folder / f"{table.name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for row in table.rows:
            line: list[float | str | None] = []
            for cell, wide in zip(row, spread, strict=True):
                number = cell if isinstance(cell, Number) else None
                line.append(number.value if number else text(cell))
                if wide:
                    line += [number.low, number.high] if number else ["", ""]
            writer.writerow(line)


def markdown(title: str, sections: list[Section]) -> str:
    lines = [f"# {title}"]
    for section in sections:
        lines.append(f"{'#' * section.level} {section.title}")
        for block in section.blocks:
            if isinstance(block, str):
                lines.append(block)
            elif isinstance(block, Picture):
                lines.append(f"![{block.caption}]({block.file})")
                lines.append(block.caption)
            else:
                lines += [f"**{block.title}**"] if block.title else []
                lines.append(_markdown_table(block))
                lines += [f"{note}" for note in block.notes]
    return "\n\n".join(lines) + "\n"


def _markdown_table(table: Table) -> str:
    rows = [[text(c).replace("|", "\\|") for c in row] for row in table.rows]
    for i in table.ours:
        rows[i] = [f"**{c}**" if c else c for c in rows[i]]
    numbers = len(table.columns) - table.n_keys
    rule = ["---"] * table.n_keys + ["---:"] * numbers
    return "\n".join(
        f"| {' | '.join(row)} |" for row in [table.columns, rule, *rows] if row
    )


STYLE = """
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #1c1c1c;
       margin: 0 auto; padding: 1.5rem; max-width: 1500px; background: #fff; }
h1 { font-size: 1.7rem; } h2 { margin-top: 3rem; border-bottom: 2px solid #ccc; }
h3 { margin-top: 2.2rem; }
nav { columns: 2; font-size: 0.9rem; margin: 1rem 0 2rem; }
nav a { display: block; } nav .sub { padding-left: 1.2rem; }
a { color: #0b57a4; text-decoration: none; }
.wide { overflow-x: auto; margin: 0.4rem 0; }
table { border-collapse: collapse; font-size: 0.82rem;
        font-variant-numeric: tabular-nums; }
th, td { padding: 0.22rem 0.45rem; text-align: right; vertical-align: top;
         border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
thead th { border-bottom: 2px solid #777; vertical-align: bottom;
           white-space: normal; max-width: 6.5rem; }
td.key, th.key { text-align: left; }
td:last-child { white-space: normal; }
td small { color: #666; display: block; font-size: 0.92em; white-space: nowrap; }
td.none { color: #9a9a9a; text-align: center; font-style: italic; }
tr.ours td, td.ours { background: #eaf3fb; }
.title { font-weight: 600; margin: 1.6rem 0 0.2rem; }
.note { font-size: 0.84rem; color: #444; max-width: 72rem; margin: 0.25rem 0; }
figure { margin: 1.2rem 0; } img { max-width: 100%; height: auto; }
figcaption { font-size: 0.84rem; color: #444; max-width: 72rem; }
.held { color: #17692f; } .not { color: #a8201a; }
@media print { .wide { overflow: visible; } }
"""


def page(title: str, sections: list[Section], folder: Path) -> str:
    """Returns one HTML document that needs nothing else: pictures are inside it."""
    body, links = [], []
    for number, section in enumerate(sections):
        anchor = f"s{number}"
        kind = ' class="sub"' if section.level > 2 else ""
        links.append(f'<a href="#{anchor}"{kind}>{html.escape(section.title)}</a>')
        level = f"h{section.level}"
        heading = html.escape(section.title)
        body.append(f'<{level} id="{anchor}">{heading}</{level}>')
        for block in section.blocks:
            if isinstance(block, str):
                body.append(f"<p>{_prose(block)}</p>")
            elif isinstance(block, Picture):
                data = base64.b64encode((folder / block.file).read_bytes()).decode()
                caption = _prose(block.caption)
                body.append(
                    f'<figure><img alt="{html.escape(block.caption)}" '
                    f'src="data:image/png;base64,{data}">'
                    f"<figcaption>{caption}</figcaption></figure>"
                )
            else:
                body.append(_html_table(block))
    # The policy makes the browser itself refuse any request to elsewhere.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1>\n<nav>{''.join(links)}</nav>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _prose(line: str) -> str:
    """Escapes a line of text; `code` is set as such."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(line, quote=False))


def _html_table(table: Table) -> str:
    head = "".join(
        f"<th{_class(i < table.n_keys, 'key')}>{html.escape(name)}</th>"
        for i, name in enumerate(table.columns)
    )
    lines = []
    for number, row in enumerate(table.rows):
        cells = _html_cells(row, table)
        lines.append(f"<tr{_class(number in table.ours, 'ours')}>{cells}</tr>")
    notes = "".join(f'<p class="note">{_prose(note)}</p>' for note in table.notes)
    title = f'<p class="title">{_prose(table.title)}</p>' if table.title else ""
    return (
        f'{title}<div class="wide"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        f"{notes}"
    )


def _html_cells(row: list[Cell], table: Table) -> str:
    """Cells of one row; neighbours that are all empty for one reason become one."""
    out, at = [], 0
    while at < len(row):
        cell, width, kinds = row[at], 1, []
        if table.columns[at].startswith(OURS):
            kinds.append("ours")
        if at < table.n_keys:
            kinds.append("key")
        elif cell in (NOT_MEASURED, NOT_BUILT):
            kinds.append("none")
            while at + width < len(row) and row[at + width] == cell:
                width += 1
        elif isinstance(cell, str) and "unsure" not in cell:
            kinds += [k for k in ("not held", "held") if cell.startswith(k)][:1]
        if isinstance(cell, Number):
            shown = html.escape(format(cell.value, cell.spec) + cell.mark)
            spread = interval(cell)
            shown += f"<small>{spread}</small>" if spread else ""
        else:
            first, _, rest = html.escape(cell).partition("\n")
            shown = first + (f"<small>{rest}</small>" if rest else "")
        span = f' colspan="{width}"' if width > 1 else ""
        kind = " ".join(kinds).replace("not held", "not")
        out.append(f"<td{_class(bool(kind), kind)}{span}>{shown}</td>")
        at += width
    return "".join(out)


def _class(condition: bool, name: str) -> str:
    return f' class="{name}"' if condition else ""

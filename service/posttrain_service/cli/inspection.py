"""What `posttrain data inspect` prints: coloured in a terminal, with the trained part in brackets elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

_BAR = 40
_TRAINED = "bold green"
_CONTEXT = "dim"


def show_inspection(console: Console, name: str, report: dict[str, Any]) -> None:
    """Print the trainer's report of a data set."""
    for number, documents in enumerate(report.get("examples", ()), start=1):
        for document in documents:
            console.print(Text(f"--- sample {number}", style="bold"))
            console.print(_marked(document, coloured=console.is_terminal), soft_wrap=True)
    for line in _lines(name, report):
        console.print(Text(line), soft_wrap=True)


def _marked(document: list[dict[str, Any]], *, coloured: bool) -> Text:
    """The sample's text; control characters but line ends are escaped, so that data cannot drive the terminal."""
    text = Text()
    for part in document:
        plain = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in part["text"])
        if coloured:
            text.append(plain, style=_TRAINED if part["trained"] else _CONTEXT)
        else:
            text.append(f"[[{plain}]]" if part["trained"] else plain)
    return text


def _lines(name: str, report: dict[str, Any]) -> list[str]:
    tokens, supervised = report["tokens"], report["supervised_tokens"]
    pack = report["packing"]
    lines = [
        "---",
        f"{name}: {report['rows']:,} rows of format {report['format']}, {report['samples']:,} samples, {tokens:,} tokens",
        f"trained on: {supervised:,} tokens, {supervised / max(1, tokens):.1%}",
        f"longest sample: {report['max_len']:,} tokens; cut at the limit: {report['truncated']:,}; invalid rows: {report['invalid']:,}",
    ]
    for reason, count in report["dropped"].items():
        where = ", ".join(str(line) for line in report["dropped_lines"].get(reason, ())[:5])
        lines.append(f"dropped: {count:,} as {reason} (lines {where}{', ...' if count > 5 else ''})")
    if not report["dropped"]:
        lines.append("dropped: none")
    most = max(bar["samples"] for bar in report["lengths"])
    lines.append("tokens a sample:")
    for bar in report["lengths"]:
        lines.append(f"  up to {bar['up_to']:>9,}  {'#' * round(_BAR * bar['samples'] / most):<{_BAR}}  {bar['samples']:,}")
    lines.append(
        f"packed into {pack['micro_batches']:,} micro-batches of {pack['max_batch_len']:,} tokens: {pack['efficiency']:.1%} of what is possible; "
        f"with padding, {pack['padded_efficiency']:.1%} of the room would hold tokens"
    )
    lines += [f"warning: {text}" for text in report["warnings"]]
    return lines

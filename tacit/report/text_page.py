"""Sections of the page of a fine-tuned language model: what it writes, and exposure of canaries."""

from typing import Any

from tacit._untrusted import printable, read_json
from tacit.experiments import EXPOSURE, SAMPLES, Facts, RunFolder
from tacit.report.page import Section

_MOST = 20  # samples on the page
_LONGEST = 600  # characters of a sample


def text_sections(facts: Facts, run: RunFolder) -> tuple[Section, ...]:
    """Return the sections about samples and canaries of a run; empty for other runs."""
    found = []
    if SAMPLES in facts.files and (rows := _samples(read_json(run / SAMPLES))):
        text = "Written by the trained model after public prompts: a part of what was released."
        header = ("prompt", "text")
        found.append(Section(name="samples", title="Samples", text=text, rows=rows, header=header))
    if EXPOSURE in facts.files:
        found.append(_exposure(read_json(run / EXPOSURE)))
    return tuple(found)


def _samples(content: Any) -> tuple[tuple[str, str], ...]:  # Any: JSON values
    rows = content.get("samples", [])[:_MOST]
    return tuple(
        (printable(str(row["prompt"]))[:_LONGEST], printable(str(row["text"]))[:_LONGEST])
        for row in rows
    )


def _exposure(content: Any) -> Section:  # Any: JSON values
    rows = tuple(
        (
            name,
            f"{len(found['bits'])}",
            f"{found['mean']:.2f} bits",
            f"{max(found['bits']):.2f} bits",
            f"{found['p_value']:.3g}",
        )
        for name, found in content["models"].items()
    )
    text = (
        "Made-up secrets were added to the training texts. Exposure measures how high a secret "
        f"ranks among {content['references']:,} others of the same form that were not added "
        "(Carlini et al. 2019). A model that has learned none of them has a mean of "
        f"{content['chance']:.2f} bits. Each secret was added "
        f"{content['repeats']} times, as records of their own."
    )
    header = ("model", "secrets", "mean exposure", "largest", "p-value of nothing learned")
    return Section(name="canaries", title="Canaries", text=text, rows=rows, header=header)

"""The model card of a converted network, for a repository of the Hugging Face hub."""

from pathlib import Path

from subquad.conversion.conversion_record import Record
from subquad.conversion.judging import Comparison
from subquad.text import counted, one_line


def model_card(record: Record) -> str:
    """Markdown: what was converted, how, what it keeps of its teacher, and how it is opened. No paths of a machine."""
    plan, conversion = record.plan, record.conversion
    # of a folder or file its name alone
    teacher = one_line(Path(str(plan["source"]).partition("=")[0]).name, 80)
    mechanisms = sorted(set(conversion["attention"].values()))
    blocks = f"{len(record.converted)} of {counted(conversion['num_blocks'], 'block')}"
    fits = f"{plan['align_updates']} updates of alignment and {plan['distil_updates']} of distillation"
    lines = [
        "---",
        "library_name: subquad",
        "tags: [subquad]",
        "---",
        f"# {teacher}, {' + '.join(mechanisms)} attention",
    ]
    lines += ["", f"`{teacher}` with {' and '.join(mechanisms)} attention in {blocks}, by `subquad convert`: {fits}"]
    lines[-1] += f" of {plan['batch_size']} images without labels ({one_line(Path(str(plan['images'])).name, 60)})."
    measure = next(iter(record.steps.values())).measure
    lines += [
        "",
        "## Figures",
        "",
        f"| | {measure} | of | kept | agrees with its teacher |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [_row(name, step) for name, step in record.steps.items()]
    lines += ["", "## Use", "", "```python", "import subquad", ""]
    lines += ['opened = subquad.open_trained("hf-hub:OWNER/NAME")', "logits = opened.model(images)", "```", ""]
    return "\n".join(lines)


def _row(name: str, step: Comparison) -> str:
    shares = (step.student_score, step.teacher_score, step.kept, step.agreement)
    return f"| {name} | " + " | ".join("" if share is None else f"{share:.2%}" for share in shares) + " |"

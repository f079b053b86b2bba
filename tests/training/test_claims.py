"""Claims are judged from what was measured and from nothing else; pages say so."""

import json
from pathlib import Path

import pytest
import torch

from subquad.analysis.paired_differences import Difference

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def claims(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import claims

    return claims


def runs(table, **rows):
    return {f"{table}/{row}-s{seed}": {"value": v} for row, values in rows.items() for seed, v in enumerate(values)}


@pytest.mark.parametrize(
    ("interval", "above", "below"),
    [
        ((0.1, 0.3), "seen", "not seen: the opposite is"),
        ((-0.1, 0.3), "not seen", "not seen"),
        ((-0.3, -0.1), "not seen: the opposite is", "seen"),
    ],
)
def test_a_verdict_is_of_the_whole_interval(claims, interval, above, below):
    difference = Difference(sum(interval) / 2, *interval, 3)
    assert claims.verdict_above(difference) == above
    assert claims.verdict_below(difference) == below
    assert claims.verdict_below(difference, 1) == "seen" and claims.verdict_above(difference, 1) != "seen"


def test_nothing_is_guessed(claims):
    nothing = claims.Measured({}, {}, {})
    verdicts = [claim.judge(nothing).verdict for claim in claims.CLAIMS]
    kept = [verdict for verdict in verdicts if verdict != "not trained yet"]
    assert len(verdicts) == 10 and kept == ["not decided yet"] * 3 + ["not testable here"]


def test_a_claim_is_judged_over_the_seeds_that_both_have(claims):
    rule = claims.better("t", "new", "old")
    done = runs("t", new=[51.0, 52.0, 53.2, 60.0], old=[50.0, 51.0, 52.0])
    judged = rule(claims.Measured(done, {}, {}))
    assert judged.verdict == "seen" and judged.beside.startswith("+1.07 (") and judged.beside.endswith("3 seeds")
    one = rule(claims.Measured(runs("t", new=[51.0], old=[50.0]), {}, {}))
    assert one.verdict == "not decided yet" and "one seed" in one.beside
    # rows of other names are others
    assert rule(claims.Measured(runs("t", **{"new-s": [1.0]}, old=[50.0]), {}, {})).verdict == "not trained yet"


def test_gains_are_compared_where_all_four_are(claims):
    rule = claims.larger_gain("t", ("plain", "branch"), ("branch", "better"))
    more = claims.Measured(runs("t", plain=[40, 41], branch=[50, 51.2], better=[52, 53.1]), {}, {})
    assert rule(more).verdict == "seen"
    assert rule(claims.Measured(runs("t", plain=[40], branch=[50, 51]), {}, {})).verdict == "not trained yet"


def test_small_networks_are_judged_where_larger_ones_have_fewer_seeds(claims):
    rule = claims.or_in_brief(lambda table: claims.better(table, "new", "old"), "whole")
    brief = runs("brief", new=[51.0, 52.0, 53.2], old=[50.0, 51.0, 52.0])
    one = runs("whole", new=[50.0], old=[51.0])
    judged = rule(claims.Measured({**brief, **one}, {}, {}))
    assert judged.verdict == "seen" and judged.beside.endswith("3 seeds, small networks (CIFAR-10 in brief)")
    assert "small" not in rule(claims.Measured(one, {}, {})).beside
    two = runs("whole", new=[50.0, 50.1], old=[51.0, 51.2])
    judged = rule(claims.Measured({**brief, **two}, {}, {}))
    assert judged.verdict == "seen" and judged.beside.endswith("3 seeds, small networks (CIFAR-10 in brief)")
    assert rule(claims.Measured(two, {}, {})).verdict == claims.OPPOSITE
    whole = runs("whole", new=[50.0, 50.1, 50.2], old=[51.0, 51.2, 51.2])
    judged = rule(claims.Measured({**brief, **whole}, {}, {}))
    assert judged.verdict == claims.OPPOSITE and "small" not in judged.beside


def found(confused=0.0, entropy=(0.8, 0.7), plain=(0.9, 0.9), similarity=()):
    measures = {"entropy": list(entropy), "similarity": [None, *similarity]}
    return {"confused": confused, "measures": measures, "entropy_with_power": {"1": list(plain)}}


def test_what_was_looked_into_takes_the_place_of_one_seed(claims):
    pairs = {"linear": (50.0, 60.0, 55.0), "inline": (2.0, 3.0, 2.5)}
    done = {f"cifar10/{row}-s{s}": {"findings": found(n)} for row, of in pairs.items() for s, n in enumerate(of)}
    # of the layer in which the entropy is least lower
    done |= {f"cifar10/pola-s{s}": {"findings": found(plain=(0.9 + 0.01 * s, 0.9))} for s in range(3)}
    rising = {"findings": found(similarity=(0.1, 0.2, 0.3, 0.4))}
    measured = claims.Measured({**done, "deep/softmax-s0": rising}, {}, {})
    verdicts = {number: claims.CLAIMS[number - 1].judge(measured) for number in (1, 6, 7)}
    assert verdicts[1].verdict == "seen" and "+52.5 (" in verdicts[1].beside and "3 seeds" in verdicts[1].beside
    assert verdicts[6].verdict == "seen" and verdicts[6].beside.startswith("+0.11 (")
    assert verdicts[7].verdict == "not decided yet" and verdicts[7].beside.startswith("+0.3 ")


def test_slopes_are_of_all_mechanisms(claims):
    rule = claims.slopes(1.1, 1.8)
    found = {"softmax": {"macs": 1.97}, "one": {"macs": 1.0}, "other": {"macs": 1.05}}
    assert rule(claims.Measured({}, {}, {"exponents": found})).verdict == "seen"
    found["other"] = {"macs": 1.2}
    judged = rule(claims.Measured({}, {}, {"exponents": found}))
    assert judged.verdict == "not seen" and "n^1.20 at most (other)" in judged.beside


def test_claims_stand_between_their_marks(claims, tmp_path):
    import evidence_page

    text = f"# Top\n\n{evidence_page.START}\nold\n{evidence_page.END}\n\nbelow\n"
    (tmp_path / "findings.md").write_text(text)
    (tmp_path / "agentsd.json").write_text(
        json.dumps({"unet": {"claims": {"training-free": {"verdict": "seen", "beside": "+1 %"}}}})
    )
    evidence_page.write_pages(runs("unknown", row=[1.0]), tmp_path)
    written = (tmp_path / "findings.md").read_text()
    assert written.startswith("# Top") and written.endswith("below\n") and "old" not in written
    assert "9. " in written and "**Seen**: +1 %" in written
    assert all(len(line) <= 120 for line in written.splitlines())
    assert evidence_page.with_claims(written, "new").count(evidence_page.END) == 1
    assert "Not counted yet" in (tmp_path / "evidence.md").read_text()


def test_the_pages_of_the_repository_are_those_of_its_results(claims):
    import agentsd_page
    import evidence_page

    docs = SCRIPTS.parent / "docs"
    file = docs / "evidence.json"
    done = json.loads(file.read_text()) if file.is_file() else {}
    measured = claims.Measured.read(docs, done)
    assert (docs / "agentsd.md").read_text() == agentsd_page.page(measured.agentsd)
    assert (docs / "evidence.md").read_text() == evidence_page.page(done, measured.scale)
    findings = (docs / "findings.md").read_text()
    assert findings == evidence_page.with_claims(findings, claims.claims_page(claims.CLAIMS, measured))


def test_accuracy_at_a_cost_lies_between_the_sizes_around_it(claims):
    from evidence_page import at_cost

    points = [(400.0, 50.0), (100.0, 40.0), (1600.0, 52.0)]
    assert at_cost(points, 200.0) == pytest.approx(45)
    assert at_cost(points, 100.0) == 40 and at_cost(points, 1600.0) == 52
    assert at_cost(points, 99.0) is None and at_cost(points, 1601.0) is None and at_cost([], 1.0) is None


def test_mechanisms_are_compared_at_equal_cost(claims):
    from evidence_page import table_lines
    from evidence_tables import TABLES

    (table,) = [table for table in TABLES if table.at_equal_cost]
    common = {"metric": "miou", "title": "mIoU %", "columns": {"mIoU %": 0, "pixels %": 80.0}, "params": 1e6}
    common |= {"train_seconds": 3600, "date": "2026-01-01", "device": "none", "torch": "0"}
    done = {}
    for row in table.rows:
        size = float(row.name.split()[1].rstrip("x"))
        for seed, more in ((0, 0.0), (1, 1.0)):
            value = 30 + 10 * size + more + 3 * (row.attention == "inline")
            done[f"{table.name}/{row.name}-s{seed}"] = {**common, "value": value, "macs": 1e9 * size**2}
    text = "\n".join(table_lines(table, done))
    assert "| softmax | 40.50 | 45.50 | 50.50 |" in text and "| inline | 43.50 | 48.50 | 53.50 |" in text
    assert "| inline 1x | 43.50 ± 0.71 | 2 | +3 (+3 to +3) | 80.00 ± 0.00 |" in text


def test_what_networks_show_stands_below_their_table(claims):
    from evidence_page import table_lines
    from evidence_tables import TABLES

    table = next(table for table in TABLES if table.looked_into)
    common = {"metric": "top1", "value": 50.0, "params": 1e6, "macs": 1e9, "train_seconds": 60}
    common |= {"date": "2026-01-01", "device": "none", "torch": "0"}
    done = {
        f"{table.name}/softmax-s0": {**common, "findings": found(7.0) | {"removed": {"local 49": 40, "random 49": 45}}},
        f"{table.name}/linear-s0": {**common, "findings": {"not_shown": {"measures": "no"}}},
        f"{table.name}/inline-s0": common,
    }
    text = "\n".join(table_lines(table, done))
    assert "| softmax | 0.750 | | | | | | | | 7.0 | 40.0, 45.0 |" in text
    assert "| linear | | | | | | | | | | , |" not in text


def images(level, count=40):
    return torch.rand(count, generator=torch.Generator().manual_seed(0)) + level


def test_what_agents_do_is_judged_by_phase(claims):
    from agentsd_page import page, summary

    rises = {"softmax": (1, 1), "merging 40 %": (1.02, 1.02), "agents 40 %": (1.01, 1.03), "agents 40 %, tuned": (1, 1)}
    levels = {"early": (650, 750), "late": (50, 150)}
    errors = {
        name: {level: rise * images(0.2) for phase, rise in zip(levels, pair, strict=True) for level in levels[phase]}
        for name, pair in rises.items()
    }
    noise = torch.randn(40, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    base = (128 + 20 * noise).to(torch.uint8)
    shift = {"softmax": 0, "as published": 30, "agents 40 %, early steps": 9, "agents 40 %, late steps": 1}
    made = {name: base + more + (noise > 1).to(torch.uint8) * bool(more) for name, more in shift.items()}
    real = (128 + 20 * torch.randn(40, 3, 4, 4, generator=torch.Generator().manual_seed(2))).to(torch.uint8)
    features = {name: pictures.flatten(1)[:, :4].double() for name, pictures in {**made, "": real}.items()}
    found = summary(errors, made, features, 600)
    verdicts = {claim: one["verdict"] for claim, one in found["claims"].items()}
    assert verdicts == {
        "early steps bear agents better": "seen",
        "agents cost less than merging as much": "seen",
        "early steps matter most": "seen",
        "training-free": "not seen: the opposite is",
    }
    assert found["errors"]["agents 40 %"]["early"][0] == pytest.approx(0.01, rel=1e-4)
    kept = json.loads(json.dumps(found))
    more = {"updates": 10, "hours": 1, "test_images": 40, "made_images": 40, "torch": "0", "toy": False}
    text = page({"unet": {**kept, **more}})
    assert "| agents 40 % | +1.00 %" in text and "Not trained yet." in text
    assert "training-free" not in summary(errors, made, {}, 600)["claims"]

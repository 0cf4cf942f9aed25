"""The page of sweeps, from rows that no run made."""

import html.parser
import itertools
import json

import numpy as np
import pytest
import report
import sweep

from copc_jax import comparison
from copc_jax.config import to_dict

HOSTILE = '</pre><script>window.hit=1</script><img src=x onerror="hit">'


def score(config):
    """COPC gains, its channels interact, and V-trace collapses."""
    loss, seed = config["loss"], config["seed"]
    base = {"copc": 0.6, "copc_no_rc": 0.5, "ppo": 0.55}.get(config["method"], 0.4)
    turn = -0.8 * (loss["eta_policy"] - 0.5) * (loss["eta_advantage"] - 0.5)
    return base + turn + 0.01 * seed + 0.003 * np.sin(7 * seed + 30 * loss["eta_policy"])


def finished(cell, **changed):
    config = to_dict(cell.config)
    final, collapsed = float(score(config)), config["method"] == "vtrace"
    record = comparison.summarize("none") | {
        "updates": 60,
        "score": "em",
        "start": 0.2,
        "final": 0.01 if collapsed else final,
        "best": final,
        "mean": final,
        "train_final": final,
        "collapsed": collapsed,
        "collapse_update": 40 if collapsed else None,
        "curve": [[0, 0.2], [20, final], [40, 0.01 if collapsed else final], [60, final]],
        "step_seconds": 2.0 if config["staleness"] == 0 else 1.0,
        **{name: 0.1 + 0.01 * config["seed"] for name, *_ in report._COUPLING},
    }
    row = {"run": cell.name, "label": cell.label, "state": "finished", "config": config}
    return row | {"error": "", "cpu_seconds": 60.0, "record": record} | changed


def save(folder, name, cells, rows):
    folder.mkdir(parents=True)
    sweep._note(folder, name, "smoke", f"python experiments/sweep.py {name} {HOSTILE}", cells)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / sweep.ROWS_FILE).write_text(text)
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """All experiments at two seeds; of each the last run failed, the one before is missing."""
    base = tmp_path_factory.mktemp("sweeps")
    folders = []
    for name in sweep.EXPERIMENTS:
        cells = sweep.plan(name, "smoke", ["--grid.seed=0,1"])
        rows = [finished(cell) for cell in cells]
        rows[-1] |= {"state": "failed", "error": f"ValueError: {HOSTILE}"}
        del rows[-2]
        folders.append(save(base / name, name, cells, rows))
    out = base / "out"
    report.main([*map(str, folders), "-o", str(out)])
    return out


class Elements(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.sources, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [v for k, v in attributes if k in ("src", "href", "onerror")]

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def elements(page):
    return Elements((page / "report.html").read_text(encoding="utf-8"))


def test_the_page_loads_nothing_and_runs_nothing(elements):
    assert "script" not in elements.tags
    assert elements.sources and all(
        s.startswith("data:image/png;base64,") for s in elements.sources
    )


def test_the_page_has_every_experiment_and_its_figures(page, elements):
    text = " ".join(elements.text)
    for experiment in sweep.EXPERIMENTS.values():
        assert experiment.title in text
    names = {path.stem for path in page.glob("*.png")}
    tables = {f"table-{task}{part}" for task in ("math", "search") for part in ("", "-curves")}
    assert names == tables | {"figure1", "figure2", "ablations", "drift"}
    assert len(elements.sources) == len(names)


def test_what_a_person_writes_is_shown_as_it_is(elements):
    assert any(HOSTILE in text for text in elements.text)
    assert elements.tags.count("img") == len(elements.sources)


def claims(elements):
    """(paper, here, verdict) of each claim."""
    found = [t for t in elements.text if t.strip()]
    places = [i for i, t in enumerate(found) if t == "paper"]
    return [(found[i + 1], found[i + 3], found[i + 5]) for i in places if found[i + 4] == "verdict"]


def test_claims_stand_beside_what_was_measured(elements):
    found = claims(elements)
    assert len(found) >= 15

    def verdict(word):
        return {v.split(":")[0] for said, _, v in found if word in said}

    # Two seeds hardly tell anything apart; what agrees or contradicts is the same kind of box.
    assert verdict("turns from gain to loss") in ({"agrees"}, {"agrees", "open"})
    assert verdict("1.7 times") <= {"agrees", "open"}
    assert {v.split(":")[0] for *_, v in found} <= {"agrees", "contradicts", "open", "missing"}


def test_a_result_against_the_paper_contradicts_it():
    four = (3, -0.1, -0.2, -0.05)
    assert report.judge(four, 1).startswith("contradicts")
    assert report.judge(four, -1).startswith("agrees")
    assert report.judge((3, 0.1, -0.1, 0.3), 1).startswith("open")
    assert report.judge((1, 0.1, -np.inf, np.inf), 1).startswith("open")
    assert report.judge(None, 1).startswith("missing")
    assert report.judge_bound((3, 1.0, 0.9, 1.1), 1.02, -1).startswith("open")
    assert report.judge_bound((3, 1.0, 0.9, 1.01), 1.02, -1).startswith("agrees")
    assert report.judge_bound((3, 1.2, 1.1, 1.3), 1.02, -1).startswith("contradicts")
    assert report.judge_bound((3, 1.2, 1.1, 1.3), 1.5, 1).startswith("contradicts")


def test_missing_and_failed_runs_are_named(elements):
    text = " ".join(elements.text)
    count = len(sweep.EXPERIMENTS)
    assert text.count("1 failed, 1 missing") >= count
    assert "ValueError: " in text and "What differs from the paper" in text


def test_collapse_is_defined_on_the_page(elements):
    text = " ".join(" ".join(elements.text).split())
    assert "Collapse, as it was fixed before any comparison was run" in text
    assert str(comparison.COLLAPSE_FLOOR) in text


def test_grids_of_ones_own_get_a_table(tmp_path):
    cells = sweep.plan(None, "small", ["--preset=quick", "--grid.seed=0,1", "--grid.updates=5,6"])
    folder = save(tmp_path / "own", None, cells, [finished(cell) for cell in cells])
    path = report.main([str(folder), "-o", str(tmp_path / "out")])
    text = Elements(path.read_text(encoding="utf-8")).text
    place = text.index("updates")
    assert "5" in text[place:] and "6" in text[place:]


def test_a_run_in_two_sweeps_counts_once(tmp_path):
    cells = sweep.plan("ablations", "smoke", ["--seed=0", "--staleness=16"])
    folders = [
        save(tmp_path / "a", "ablations", cells, [finished(cell) for cell in cells[:2]]),
        save(tmp_path / "b", "ablations", cells, [finished(cell) for cell in cells[1:3]]),
    ]
    for order in itertools.permutations(folders):
        (found,) = report.read(order)
        states = [row["state"] for row in found.rows]
        assert len(states) == len(cells) and states.count("finished") == 3


def test_a_folder_without_rows_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        report.main([str(tmp_path)])
    assert refused.value.code == 2 and "no sweep" in capsys.readouterr().err

"""The report in a browser: every chart is drawn, and filters, colours, links and keys do what they say."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from helpers.recorded import made_run, metrics_of, row_of, spans_of

from hybridflow.kit.recording import SAMPLES, read_rows
from hybridflow.report.building import write_report
from hybridflow.report.contents import contents
from hybridflow.report.serving import PageServer

pytestmark = pytest.mark.timeout(1200)  # the demo may be run first

TABS = ("overview", "samples", "time", "memory", "health")


@pytest.fixture(scope="module")
def report(demo, tmp_path_factory):
    """The demo's report, which is small and was made quickly."""
    began = time.perf_counter()
    file = write_report([demo], tmp_path_factory.mktemp("report") / "report.html")
    assert time.perf_counter() - began < 10
    assert file.stat().st_size < 5_000_000
    return file


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    """A run of episodes in turns, over two seeds, with something wrong in one of them."""
    folder = tmp_path_factory.mktemp("episodes")
    turns = np.array([0, 0, -1, -1, 1, 1], np.int32)
    for seed in (0, 1):
        rows = [
            row_of(
                step, at, turn=turns, loss_mask=(turns >= 0).astype(np.uint8), lesson=f"l{at % 3}"
            )
            for step in range(1, 41)
            for at in range(8)
        ]
        metrics = [
            metrics_of(step, actor__clip_fraction=0.5 if seed else 0.0, seconds__predicted=1.25)
            for step in range(1, 41)
        ]
        made_run(folder / f"seed-{seed}", {"run.seed": seed}, metrics, rows)
    return write_report([folder], folder / "report.html")


NAMELESS = """() => {
  const kinds = "button, input, select, a, [role=img], [role=tab], table, svg, [role=region]";
  const named = node => [
    node.getAttribute("aria-label"), node.getAttribute("aria-labelledby"), node.closest("label")?.innerText, node.innerText,
    node.querySelector?.("caption, title")?.textContent,
  ].some(name => (name || "").trim());
  const ours = [...document.querySelectorAll(kinds)].filter(node => !node.closest(".u-legend"));
  return ours.filter(node => !named(node)).map(node => node.outerHTML.slice(0, 80));
}"""
"""Whatever a screen reader would have no name for."""


def wait_for_view(page, tab: str) -> None:
    page.wait_for_selector(f"body[data-tab={tab}]")


def drawn(page) -> tuple[int, int]:
    """The number of charts, and of those whose canvas has something on it."""
    script = """() => [...document.querySelectorAll("figure.chart")].map(figure => {
      const canvas = figure.querySelector("canvas");
      if (!canvas || figure.dataset.drawn !== "yes") return false;
      const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      const colours = new Set();
      for (let at = 0; at < pixels.length; at += 4) if (pixels[at + 3] > 60) colours.add(pixels.slice(at, at + 3).join());
      return colours.size > 3;
    })"""
    marks = page.evaluate(script)
    return len(marks), sum(marks)


@pytest.mark.parametrize("tab", TABS)
@pytest.mark.parametrize("which", ["report", "episodes"])
def test_every_part_opens_and_every_chart_is_drawn(request, opened, which, tab):
    page = opened(request.getfixturevalue(which), f"tab={tab}")
    wait_for_view(page, tab)
    charts, with_lines = drawn(page)
    assert charts == with_lines
    assert charts >= {"overview": 8, "time": 1, "memory": 1}.get(tab, 0)
    assert page.locator("#main").inner_text().strip()


def test_the_curves_of_the_demo_are_those_of_its_metrics(opened, report, demo):
    page = opened(report, "tab=overview")
    [said] = [
        label
        for label in page.locator("figure [role=img]").evaluate_all(
            "nodes => nodes.map(node => node.getAttribute('aria-label'))"
        )
        if label.startswith("Chart of validation/score")
    ]
    lines = (demo / "grpo/metrics.jsonl").read_text().splitlines()
    scores = [
        (row["step"], row["validation/score"])
        for row in map(json.loads, lines)
        if "validation/score" in row
    ]
    first, last = scores[0], scores[-1]
    assert f"{first[1]:g} at step {first[0]}, {last[1]:g} at step {last[0]}" in said

    # Another metric by its name, and a smoothing that survives in the address.
    before = page.locator("figure.chart").count()
    page.fill("input[list=metrics]", "actor/lr")
    page.dispatch_event("input[list=metrics]", "change")
    page.wait_for_selector('[data-chart="actor/lr"]')
    assert page.locator("figure.chart").count() == before + 1
    assert "more=actor%2Flr" in page.url


def test_seeds_are_drawn_as_their_mean_and_range_or_each(opened, episodes):
    page = opened(episodes, "tab=overview")
    chart = page.locator('[data-chart="reward/scores"]')
    assert "2 seeds of" in chart.inner_text() and "lowest" in chart.inner_text()
    page.locator("select").first.select_option("apart")
    page.wait_for_function(
        "() => !document.querySelector('[data-chart=\"reward/scores\"]').innerText.includes('seeds of')"
    )
    assert "seed-1" in page.locator('[data-chart="reward/scores"]').inner_text()
    assert "run.seed" in page.locator("details").first.inner_text()


def rows_shown(page) -> list[list[str]]:
    return page.locator(".list tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    )


def test_filters_keep_the_rows_that_they_name(opened, report, demo):
    page = opened(report, "tab=samples")
    recorded = [row for row in read_rows(demo / "grpo", SAMPLES)]
    assert (
        page.locator("#count").inner_text().startswith(f"{len(recorded)} of {len(recorded)} rows")
    )

    def filtered(name: str, value: str) -> list[list[str]]:
        field = page.locator(f"[name={name}]")
        if field.evaluate("node => node.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
            field.dispatch_event("change")
        page.wait_for_function(
            f"() => new URLSearchParams(location.hash.slice(1)).get('{name}') === '{value}'"
        )
        return rows_shown(page)

    found = filtered("step", "3")
    expected = [row for row in recorded if row["step"] == 3]
    assert [row[0] for row in found] == ["3"] * len(expected) and expected
    found = filtered("low", "1")
    assert len(found) == sum(row["scores"] >= 1 for row in expected)
    page.click("text=Clear")
    page.wait_for_function("() => document.querySelector('[name=step]').value === ''")
    assert len(filtered("data", "validation")) == sum(
        row["data"] == "validation" for row in recorded
    )
    page.click("text=Clear")
    page.wait_for_function("() => document.querySelector('[name=data]').value === ''")
    found = filtered("text", "097")
    assert found and all(
        "097" in row["response"] + row["prompt"]
        for row in recorded
        if any(cells[5].startswith(row["response"][:3]) for cells in found)
        and "097" in row["response"]
    )
    page.click("text=Clear")
    page.wait_for_function("() => document.querySelector('[name=text]').value === ''")
    found = filtered("outcome", "truncated_tokens")
    assert len(found) == min(200, sum(row.get("outcome") == "truncated_tokens" for row in recorded))


def test_tokens_are_those_of_the_row_and_coloured_by_what_is_chosen(opened, report, demo):
    recorded = list(read_rows(demo / "grpo", SAMPLES))
    page = opened(report, "tab=samples&row=3")
    box = page.locator("section .tokens").last
    assert box.inner_text() == "".join(recorded[3]["response_tokens"])

    for name, column in {
        "rollout_logprobs": "rollout_logprobs",
        "advantages": "advantages",
        "weight_version": "weight_version",
        "loss_mask": "loss_mask",
    }.items():
        page.locator("[name=colour]").select_option(name)
        page.wait_for_function(
            f"() => new URLSearchParams(location.hash.slice(1)).get('colour') === '{name}'"
        )
        spans = page.locator("section .tokens").last.locator("span")
        values = [
            float(value)
            for value in spans.evaluate_all("nodes => nodes.map(node => node.dataset.value)")
        ]
        assert values == pytest.approx(recorded[3][column], abs=1e-4)
        colours = spans.evaluate_all("nodes => nodes.map(node => node.style.background)")
        assert all(colours) and page.locator("section .legend").inner_text().strip()
        # What differs has different colours.
        assert len(set(colours)) == len({round(value, 4) for value in recorded[3][column]})

    page.locator("[name=colour]").select_option("mismatch")
    page.wait_for_function("() => location.hash.includes('colour=mismatch')")
    spans = page.locator("section .tokens").last.locator("span")
    values = [
        float(value)
        for value in spans.evaluate_all("nodes => nodes.map(node => node.dataset.value)")
    ]
    trainer = np.array(recorded[3].get("old_logprobs", recorded[3]["logprobs"]))
    assert values == pytest.approx(trainer - recorded[3]["rollout_logprobs"], abs=1e-6)


def test_a_group_stands_side_by_side_and_a_prompt_over_training(opened, episodes, report, demo):
    page = opened(report, "tab=samples&row=0")
    page.click("text=Its group side by side")
    page.wait_for_selector(".side")
    recorded = list(read_rows(demo / "grpo", SAMPLES))
    size = sum(
        row["step"] == recorded[0]["step"] and row["group"] == recorded[0]["group"]
        for row in recorded
    )
    assert page.locator(".side > div").count() == size == 8

    # Validations ask the same prompts again.
    page = opened(report, "tab=samples&data=validation")
    page.click("text=Its prompt over training")
    page.wait_for_function("() => location.hash.includes('view=prompt')")
    heads = page.locator("section h3 a").all_inner_texts()
    steps = [int(head.split(",")[0].removeprefix("step ")) for head in heads]
    assert len(set(steps)) > 3 and steps == sorted(steps)

    # Episodes show their turns.
    page = opened(episodes, "tab=samples&row=0")
    assert page.locator("section .turn").all_inner_texts() == ["turn 1", "environment", "turn 2"]


def test_links_lead_from_a_curve_to_samples_to_times_and_back(opened, report):
    page = opened(report, "tab=overview")
    page.locator('[data-chart="reward/scores"] .u-over').click(position={"x": 120, "y": 60})
    wait_for_view(page, "samples")
    step = page.locator("[name=step]").input_value()
    assert step and {row[0] for row in rows_shown(page)} == {step}
    page.click("text=This step's time")
    wait_for_view(page, "time")
    assert page.locator("[name=lanes]").input_value() == step
    page.click("text=Samples of this step")
    wait_for_view(page, "samples")
    assert page.locator("[name=step]").input_value() == step
    page.go_back()
    wait_for_view(page, "time")


def test_the_lanes_of_a_step_are_its_spans(opened, report, demo):
    [run] = [run for run in contents([demo])["runs"] if run["folder"].endswith("grpo")]
    page = opened(report, "tab=time&step=2")
    bars = page.locator(".lanes rect[role=button]")
    spans = run["timeline"]["steps"][2]
    assert bars.count() == len(spans)
    page.locator(".lanes rect[aria-label*='actor/update,']").first.click()
    texts = run["timeline"]["texts"]
    [update] = [
        span
        for span in spans
        if (texts[span[1]], texts[span[2]]) == ("actor", "update")
        and texts[span[0]] != "controller"
    ]
    said = page.locator("#span").inner_text()
    assert said.startswith("main/0: actor/update, ") and f"{update[4] / 1e3:.2f} s" in said
    page.click("text=Later")
    page.wait_for_function("() => document.querySelector('[name=lanes]').value === '3'")
    table = page.locator("table", has_text="Over all recorded steps").inner_text()
    assert "actor/update@main/0" in table


def test_predictions_stand_beside_what_was_measured(opened, episodes):
    page = opened(episodes, "tab=time")
    row = (
        page.locator("table", has_text="Without the first step")
        .locator("tbody tr")
        .first.inner_text()
    )
    assert "1.00 s" in row and "1.25 s" in row and "25%" in row
    assert "predicted" in page.locator('[data-chart="seconds of a step"]').inner_text()


def test_findings_are_told_and_lead_to_their_steps(opened, episodes):
    page = opened(episodes, "tab=health")
    assert page.locator("[role=tab]", has_text="Health (1)").count() == 1
    finding = page.locator("[data-rule=clipping]")
    assert finding.inner_text().startswith("Alarm: clipping") and "50%" in finding.inner_text()
    assert page.locator(".good").count() == 1  # the other seed
    finding.locator("a").click()
    wait_for_view(page, "overview")


def test_all_can_be_done_with_keys_and_everything_has_a_name(opened, report):
    page = opened(report, "tab=overview")
    page.locator("#tab-overview").focus()
    page.keyboard.press("ArrowRight")
    wait_for_view(page, "samples")
    assert page.evaluate("document.activeElement.id") == "tab-samples"
    page.keyboard.press("End")
    wait_for_view(page, "health")
    page.keyboard.press("Home")
    wait_for_view(page, "overview")

    page = opened(report, "tab=samples")
    rows = page.locator(".list tbody tr")
    rows.nth(0).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".list tr[aria-selected=true]")
    assert rows.nth(1).get_attribute("aria-selected") == "true"
    assert page.evaluate("document.activeElement.dataset.row") == rows.nth(1).get_attribute(
        "data-row"
    )

    # What a screen reader says: no control, table or picture without a name, one main heading.
    for tab in TABS:
        page = opened(report, f"tab={tab}")
        wait_for_view(page, tab)
        nameless = page.evaluate(NAMELESS)
        assert nameless == []
        assert page.locator("h1").count() == 1
        assert page.locator("[role=tab][aria-selected=true]").get_attribute("id") == f"tab-{tab}"
        assert (
            page.locator("th:not([scope])").evaluate_all(
                "nodes => nodes.filter(node => !node.closest('.u-legend')).length"
            )
            == 0
        )


def test_dark_and_narrow_screens_show_it_too(browser, report):
    context = browser.new_context(viewport={"width": 480, "height": 800}, color_scheme="dark")
    page = context.new_page()
    for tab in TABS:
        page.goto(f"{report.as_uri()}#tab={tab}")
        wait_for_view(page, tab)
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == "rgb(22, 27, 34)"
    # The page itself does not scroll sideways where it is read.
    page.goto(f"{report.as_uri()}#tab=samples")
    wait_for_view(page, "samples")
    assert page.evaluate(
        "document.querySelector('.two').scrollWidth <= document.documentElement.clientWidth"
    )
    context.close()


def test_a_served_page_shows_newer_steps_by_itself(opened, tmp_path):
    run = made_run(tmp_path / "a", done=False, rows=[], spans=spans_of(1), steps=12)
    with PageServer([run]) as server:
        page = opened(server.address, "tab=overview")
        assert "12 of 40" in page.locator("table").first.inner_text()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics_of(13)) + "\n")
        page.wait_for_function(
            "() => document.querySelector('table').innerText.includes('13 of 40')", timeout=15000
        )
        # The tab that was open stays, and so does what was asked for.
        assert page.evaluate("location.hash") == "#tab=overview"


def test_what_a_model_wrote_is_text_and_never_part_of_the_page(opened, tmp_path):
    attack = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    row = row_of(
        1, 0, length=2, response_tokens=[attack, "</script>"], outcome=attack, lesson=attack
    )
    made_run(tmp_path / "a", rows=[row], spans=[], metrics=[metrics_of(1)])
    page = opened(write_report([tmp_path / "a"], tmp_path / "report.html"), "tab=samples&row=0")
    assert page.locator("section .tokens").last.inner_text() == f"{attack}</script>"
    assert page.locator("#main img, #main script").count() == 0 and page.title() == "a"

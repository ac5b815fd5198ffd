"""The page of all rows is one whole file, tells what rows tell, and says where there are none."""

import re

import pytest
from html_page import Page
from row_cases import RUN, STUDY_ROWS, TABLE_ROWS, page_sources, published, studied

from cosformer.report.html import UNMEASURED
from cosformer.report.page import TITLES, headlines, page
from cosformer.report.reproduce import REPRODUCED

PARTS = [*TITLES, "speed", "probes", "losses", "maps-of-heads", "writing"]


def read(sources):
    text = page(sources)
    return text, Page(text)


def check_is_whole(text, found):
    assert not found.open
    assert len(set(found.ids)) == len(found.ids)
    assert set(PARTS) <= set(found.ids)
    assert all(
        link[1:] in found.ids for link in found.links
    )  # inside the page: it needs no network
    assert not re.search(r"https?://(?!www\.w3\.org)|url\(|@import", text)
    count = len(found.data["rows"])
    assert all(0 <= number < count for numbers in found.rows for number in numbers)
    drawn = {f"chart-{chart['id']}" for chart in found.data["charts"]}
    assert drawn == {each for each in found.ids if each.startswith("chart-")}


def test_a_page_of_all_kinds_of_rows_has_every_table_chart_and_map(sources):
    text, found = read(sources)
    check_is_whole(text, found)
    charts = {chart["id"]: chart for chart in found.data["charts"]}
    assert set(charts) == {"time", "memory", "loss", "position", "judged", "stream"}
    assert all(line["points"] for chart in charts.values() for line in chart["views"][0]["lines"])
    assert [model["name"] for model in found.data["maps"]] == ["cosFormer", "softmax"]
    assert found.count["table"] == len(REPRODUCED) + 9
    assert "<b>Once &lt;upon&gt;</b> a time" in text


def test_a_number_leads_to_the_rows_that_it_is_made_of_and_rows_stand_once(sources):
    text, found = read(sources)
    (numbers,) = re.findall(r'data-rows="([\d ]+)"[^>]*>38\.0 ± 2\.0 \(3\)', text)
    rows = [found.data["rows"][int(number)] for number in numbers.split()]
    assert [row["value"] for row in rows if row["config"]["rate"] == 3e-4] == [0.36, 0.38, 0.40]
    run = found.data["runs"][rows[0]["run"]]
    assert (run["file"], run["commit"]) == ("reproduce-lra", "0123456789ab")
    spelt = [str(row) for row in found.data["rows"]]
    assert len(set(spelt)) == len(spelt)


def test_a_line_has_the_length_from_which_on_it_is_below_softmax(sources):
    (chart,) = (c for c in read(sources)[1].data["charts"] if c["id"] == "time")
    (view,) = (v for v in chart["views"] if v["name"] == "forward, Test processor")
    (ours, theirs) = view["lines"]
    assert (ours["name"], theirs["name"], view["against"]) == ("cosformer", "softmax", "softmax")
    assert ours["below"] == pytest.approx(512)
    assert ours["on"]
    assert "below" not in theirs


def test_headlines_are_computed_from_rows(sources):
    sources["study-lm"] = [*STUDY_ROWS, studied("gated", 3e-3, 1.7, mechanism="gated")]
    found = {headline.number: headline.text for headline in headlines(sources)}
    assert list(found) == ["1 ×", "-0.050", "+0.100", "+1.300", "2 MiB"]
    assert "multiscale, 1/2 of its layers exact, has 1.550" in found["-0.050"]
    assert "forward + backward, 1,024 tokens, Test processor" in found["1 ×"]
    assert found["+0.100"].endswith("gated, without exact layers, has 1.700; softmax has 1.600")
    sources["study-lm"].append(studied("softmax-conv", 3e-3, 1.4, mechanism="softmax"))
    assert headlines(sources)[2].number == "+0.300"  # beside the best softmax, not a weaker one
    assert headlines({}) == []


def test_the_headline_of_generation_compares_equally_many_streams():
    def ratio(value, position, to_batch, candidate="gated"):
        about = {"candidate": candidate, "batch": 64, "to_batch": to_batch, "position": position}
        return RUN.row("generation_speed_ratio", value, "x", **about)

    rows = [ratio(3.0, 2048, 64), ratio(18.0, 16_384, 64), ratio(70.0, 65_536, 32)]
    rows.append(ratio(9.0, 65_536, 64, "gated*5 softmax"))
    (found,) = headlines({"generation-cuda": rows})
    assert found.number == "18 ×"
    assert "gated, 64 streams after 16,384 tokens each" in found.text
    assert headlines({"generation-cuda": rows[2:]}) == []


def test_a_page_without_rows_says_so_everywhere():
    text, found = read({})
    check_is_whole(text, found)
    assert found.count["table"] == len(REPRODUCED)
    assert found.texts.count(UNMEASURED) == sum(
        len(about.entries) * (len(about.columns) + bool(about.mean))
        for about in REPRODUCED.values()
    )
    assert "Not measured yet: cosformer reproduce probes" in text
    assert "Not measured yet: cosformer reproduce speed" in text
    assert not found.rows


def test_further_tables_are_taken_over_from_markdown():
    table = "Title:\n\n| a | b |\n| :-- | --: |\n| x & y | **1** |\n\n* a point"
    text = page({}, {"What <else>": [table]})
    assert not Page(text).open
    assert "<summary>What &lt;else&gt;</summary><p" in text
    assert '<th scope="row">x &amp; y</th><td><strong>1</strong></td>' in text
    assert "<li>a point</li>" in text


def test_a_reason_stands_in_the_cell_that_it_emptied():
    text, _ = read({"reproduce-lra": TABLE_ROWS})
    assert '<span class="why">failed at rate 0.001: no room (exit code 4)</span>' in text


def test_what_rows_say_is_text_and_never_html():
    worse = RUN.row("bits_per_byte", 1.0, "bits", **STUDY_ROWS[0].config | {"entry": "<script>"})
    text, found = read({"study-lm": [*STUDY_ROWS, worse]})
    assert not found.open
    assert "<script>" in found.texts
    assert "</script><" not in text.partition('id="data">')[2].partition("</script>")[0]


def test_the_published_rows_make_a_page():
    check_is_whole(*read(published()))


@pytest.fixture
def sources(rows):
    return page_sources(rows)

"""The page in a real Chromium: it loads, lives, survives its coordinator, and is for everybody. One browser for all."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from tests.page.log_fakes import WEIGHT, FakeLog
from tests.page.world import EVIL, FRAMED, LIAR, STRANGER, World, audited_world, crowd, peer
from tests.support.credit_texts import CREDIT_TEXTS
from tests.support.long_cases import long_cases
from tests.support.specs import identity
from tests.support.waiting import wait_until

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[test]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("no Chromium here: `make chromium` installs Debian's", allow_module_level=True)

ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
ACCOUNT, TEAM = identity("ada"), "blue/<b>100%</b>üWWWWWWWWWWWWWWWWWWWWW"
VIEWS = [
    "",
    "#peers",
    "#rounds",
    "#audits",
    "#leaderboard",
    "#model",
    "#join",
    f"#peer/{peer(5).key}",
    "#round/7",
    f"#account/{ACCOUNT.key}",
    f"#team/{quote(TEAM, safe='')}",
]
WAIT = 120_000
"""Milliseconds."""
ADVICE: dict[str, tuple[str, list[str]]] = {
    "waiting": ("Be the first: take part.", ["#join"]),
    "idle": ("Take part, and training goes on from round 7.", ["#join"]),
    "stalled": ("Volunteers: leave your peers running", ["#peers"]),
    "split": ("Peers return to the chain by themselves.", []),
    "catching up": ("Nothing to do: peers train meanwhile.", []),
    "trouble": ("Nothing to do for volunteers", []),
    "paused": ("Nothing to do: peers keep their work", []),
    "finished": ("Take the model with you", ["#model"]),
    "ended": ("What was trained is kept", ["#model"]),
}
"""In each state of docs/page.md but the healthy one: the beginning of the advice, and its links."""
OWN = "willReadFrequently"
"""The browser's warning about this test's own reading of the pixels."""

CROWD_ROUNDS = int(os.environ.get("PAGE_ROUNDS", "600"))
"""Of the run with a thousand peers; 10,000 take half a minute to be followed."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("run"))
    world.log = FakeLog()
    world.routes = world.log.routes()
    world.start()
    world.name_peers()
    world.play(12)
    world.bind(0, ACCOUNT, "the ada lab", TEAM)
    yield world
    world.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """`tab(world, "#peers", dark=..., phone=...)`: an open page; at the end, that no error was on its console."""
    contexts, errors = [], []

    def open_tab(world: World, view: str = "", *, dark: bool = False, phone: bool = False) -> Any:
        size = {"width": 390, "height": 844} if phone else {"width": 1280, "height": 900}
        context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light")
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT)
        page.on(
            "console", lambda m: errors.append(m.text) if m.type in ("error", "warning") and OWN not in m.text else None
        )
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.errors = errors
        page.goto(world.url + view)
        until(page, "document.querySelector('#message').textContent.includes('training')")
        return page

    yield open_tab
    for context in contexts:
        context.close()
    assert not errors


def until(page: Any, expression: str) -> None:
    """Waits for it. Not Playwright's own way, which the page's policy on scripts forbids."""
    end = time.monotonic() + WAIT / 1000
    while not page.evaluate(f"() => Boolean({expression})"):
        assert time.monotonic() < end, f"not in time: {expression}"
        page.wait_for_timeout(40)


def drawn(page: Any) -> list[int]:
    """Pixels with something on them, of each chart."""
    return page.evaluate(
        """() => [...document.querySelectorAll('.chart canvas')].map((c) => {
            const pixels = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
            let inked = 0;
            for (let i = 3; i < pixels.length; i += 4) if (pixels[i]) inked++;
            return inked;
        })"""
    )


def text(page: Any, selector: str) -> str:
    return page.locator(selector).inner_text()


def test_it_opens_with_the_state_in_words_and_all_charts_drawn(world, tab):
    page = tab(world)
    assert text(page, "#health").casefold() == "healthy" and page.title().startswith("healthy · tiny stories")
    words = r"12 peers training, round \d+, loss [\d.]+, [\d.]+k tokens/s; next round in "
    assert re.search(words, text(page, "#message"))
    until(page, "document.querySelectorAll('.chart canvas').length === 6")
    until(page, "document.querySelectorAll('#view .wide tbody tr').length === 8")
    assert all(pixels > 500 for pixels in drawn(page))
    assert "newest train" in page.locator(".chart").nth(4).get_attribute("aria-label")
    assert "announced 1.2 s after the record was proposed" in text(page, "#view")


def test_each_state_that_asks_something_of_people_comes_with_advice(world, tab):
    page = tab(world)
    assert not page.locator("#advice").is_visible(), "it is healthy"
    shown = page.evaluate(
        """async (states) => {
            const { showHeader } = await import('/static/js/header.js');
            const now = await (await fetch('/api/status')).json();
            const [said, join] = ['advice', 'take-part'].map((id) => document.getElementById(id));
            return states.map((health) => {
                showHeader({ ...now, health, round: 7 });
                const links = [...said.querySelectorAll('a')].map((a) => a.getAttribute('href'));
                return [health, said.hidden ? '' : said.textContent, links, join.hidden];
            });
        }""",
        [*ADVICE, "healthy"],
    )
    for health, said, links, over in shown:
        words, expected = ADVICE.get(health, ("", []))
        assert said.startswith(words) and bool(said) == bool(words) and links == expected, health
        assert over == (health in ("finished", "ended")), "nobody joins a run that is over"


def test_a_chart_without_its_data_says_so_and_not_that_there_is_none(world, tab):
    page, held, go_on = tab(world), [], []
    page.route("**/api/charts", lambda route: route.continue_() if go_on else held.append(route))
    page.reload()
    until(page, "document.querySelector('#message').textContent.includes('training')")
    wait_until(lambda: page.wait_for_timeout(40) or held, "the charts' data are asked for")
    assert set(page.locator(".chart-box .empty").all_inner_texts()) == {"loading"}
    assert not page.locator(".chart:visible").count()
    go_on.append(True)
    for route in held:
        route.continue_()
    until(page, "document.querySelectorAll('.chart canvas').length === 6")
    assert not page.locator(".chart-box .empty:visible").count()


def test_it_lives_without_being_loaded_again(world, tab):
    page = tab(world)
    until(page, "document.querySelectorAll('.chart canvas').length === 6")
    page.evaluate("window.untouched = true")
    before, lines = len(world.swarm.chain.certificates), drawn(page)
    world.act(world.round())
    until(page, f"document.querySelector('#message').textContent.includes('round {before + 1},')")
    until(page, f"document.querySelector('#view .wide tbody')?.innerText.startsWith('{before}')")
    assert page.evaluate("window.untouched") and drawn(page) != lines


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Yield a run that was paused for 25 minutes, and had one round of a second."""
    world = World(tmp_path_factory.mktemp("interrupted")).start()
    world.name_peers()
    world.play(9)
    world.pause(1500, "<b>data</b> are checked")
    world.play(6)
    world.round_seconds = 1.0
    world.play(1)
    world.round_seconds = 48.0
    world.play(6)
    yield world
    world.close()


def strokes(page: Any, chart: int) -> int:
    """Return the number of pieces of the first line of a chart: runs of columns of pixels with its colour."""
    return page.evaluate(
        """(chart) => {
            const c = document.querySelectorAll('.chart canvas')[chart];
            const pixels = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
            let pieces = 0, without = 9;  // a mark over the line is narrow
            for (let x = 60; x < c.width; x++) {
                let here = false;
                for (let y = 0; y < c.height; y++) {
                    const i = 4 * (y * c.width + x);
                    const away = [13, 148, 136].reduce((sum, own, n) => sum + Math.abs(pixels[i + n] - own), 0);
                    here ||= away < 30;
                }
                if (here && without > 5) pieces++;
                without = here ? 0 : without + 1;
            }
            return pieces;
        }""",
        chart,
    )


def test_charts_break_at_a_pause_mark_it_and_keep_their_scale_in_spite_of_one_round(interrupted, tab):
    page = tab(interrupted)
    until(page, "document.querySelectorAll('.chart canvas').length === 6")
    assert strokes(page, 0) == 1, "by tokens there is no gap"
    assert [strokes(page, chart) for chart in (1, 2, 3)] == [2, 2, 2]
    assert "paused" in text(page, ".marks") and ": <b>data</b> are checked" in text(page, ".marks")
    said = page.locator(".chart").nth(2).get_attribute("aria-label")
    assert re.search(r"newest tokens/s [45678]\.\dk; 1 value beyond the scale: \d\d", said), said


def test_charts_have_a_log_scale_smoothing_and_perplexity_and_a_browser_remembers(interrupted, tab):
    page = tab(interrupted)
    until(page, "document.querySelectorAll('.chart canvas').length === 6")
    plain = page.locator(".chart").first.text_content()
    page.locator("button", has_text="perplexity").click()
    page.locator(".controls input[type=checkbox]").check()
    page.locator(".controls input[type=range]").fill("0.6")
    assert page.locator(".chart-box h2").first.inner_text().startswith("Perplexity by tokens")
    assert "training, smoothed" in (page.locator(".chart").first.text_content() or "") and "smoothed" not in plain
    page.reload()
    until(page, "document.querySelectorAll('.chart canvas').length === 6")
    assert page.locator(".chart-box h2").first.inner_text().startswith("Perplexity")
    assert page.locator(".controls input:checked").count() == 1
    assert page.locator(".controls input[type=range]").input_value() == "0.6"


def test_a_chart_is_zoomed_by_dragging_stays_so_in_a_new_round_and_returns(world, tab):
    page = tab(world)
    until(page, "document.querySelectorAll('.chart canvas').length === 6")
    whole, over = drawn(page)[0], page.locator(".chart .u-over").first
    box = over.bounding_box()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 60, steps=4)
    page.mouse.up()
    zoomed = drawn(page)[0]
    assert zoomed != whole
    rounds = len(world.swarm.chain.certificates)
    world.act(world.round())
    until(page, f"document.querySelector('#view .wide tbody').innerText.startsWith('{rounds}')")
    page.mouse.move(0, 0)
    assert abs(drawn(page)[0] - zoomed) < abs(zoomed - whole)
    over.dblclick()
    page.mouse.move(0, 0)
    assert abs(drawn(page)[0] - whole) < abs(zoomed - whole)


def test_what_is_done_to_columns_before_they_are_drawn(world, tab):
    page = tab(world)

    def run(body: str) -> Any:
        return page.evaluate(f"async () => {{ const s = await import('/static/js/series.js'); return {body}; }}")

    steady = [10 * i for i in range(9)]
    assert run(f"s.breaks({[*steady, 180, 190, 200]})") == [9], "one gap is nine times the usual"
    assert run(f"s.breaks({[*steady, *range(140, 740, 60)]})") == [], "slower rounds are no gap"
    assert run(f"s.breaks({steady}, [35])") == [4], "a pause is one, however short"
    assert run("s.withGaps([[1, 2, 6], [5, 6, 7]], [2])") == [[1, 2, 4, 6], [5, 6, None, 7]]
    assert run("s.freaks([5, 6, 5, 6, 190, 5, 6, null, 5])") == [4]
    assert run("s.freaks([90, 6, 5, 6, 5, 6])") == [0] and run("s.freaks([90, 6, 5, 6, 5, 6], true)") == []
    assert run("s.freaks([9, 7, 5.5, 4.5, 4, 3.7, 3.5, 3.4, 3.3, 3.2])") == [], "a loss that falls"
    assert run("s.extent([[1, 50, 3], [undefined, 2, null]], [new Set([1]), new Set()])") == [1, 3]
    assert run("s.smoothed([4, 8, null, 6, 99], 0.5, new Set([4]))") == [4, pytest.approx(20 / 3), None, 6, 6]
    assert run("s.logTicks(2.9, 11)") == [3, 4, 5, 6, 8, 10] and run("s.logTicks(1, 2e6).length") == 7
    assert run("s.logTicks(3.31, 3.39)") == [3.32, 3.34, 3.36, 3.38]
    assert run("[0.25, 0.5, 0.02, 1, 20].map(s.digits)") == [2, 1, 2, 0, 0]


def test_the_line_to_join_is_copied_and_the_invite_is_drawn(world, tab):
    page = tab(world, "#join")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    last = page.locator(".line").last
    last.locator("button").click()
    until(page, "[...document.querySelectorAll('.line [role=status]')].at(-1).textContent === 'copied'")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == last.locator("code").inner_text() and copied.startswith("cairn peer join cairn1:")
    until(page, "document.querySelector('.join img').naturalWidth > 0")
    _, run = page.locator("details", has_text="Container").locator("code").all_text_contents()
    assert run.endswith(f" cairn-peer {copied.removeprefix('cairn ')} --device cuda")


def test_a_row_of_a_team_leads_to_its_totals_accounts_and_peers(world, tab):
    page = tab(world, "#leaderboard")
    page.locator("[data-by=team]").click()
    page.locator("#view .wide a", has_text=TEAM).click()
    page.wait_for_selector(".facts")
    until(page, "document.querySelector('#view .wide tbody').innerText.includes('the ada lab')")
    assert text(page, "#view h2") == f"Team {TEAM}" and page.locator("#view .wide tbody tr").count() == 1
    assert page.locator("#tabs [aria-current]").inner_text() == "Leaderboard"
    shown = page.locator("#view .wide tbody td").all_inner_texts()
    assert shown[2:3] + shown[-1:] == [page.locator(".facts dd").nth(n).inner_text() for n in (0, 5)]
    page.locator("[data-by=peer]").click()
    until(page, "document.querySelector('#view .wide tbody').innerText.includes('ada\t')")
    for broken in ("%E0%A4", "nobody"):
        page.goto(f"{world.url}#team/{broken}")
    until(page, "document.querySelector('#view').innerText.includes('no account of this run names this team')")


def test_credits_are_written_as_in_the_terminal(world, tab):
    page = tab(world)
    written = page.evaluate(
        "async (all) => { const f = await import('/static/js/format.js'); return all.map((n) => f.credits(n)); }",
        list(CREDIT_TEXTS),
    )
    assert written == list(CREDIT_TEXTS.values())


def test_it_says_that_its_coordinator_is_gone_and_finds_it_again(world, tab):
    page = tab(world)
    page.evaluate("window.untouched = true")
    world.stop()
    until(page, "document.querySelector('#health').textContent === 'no answer'")
    assert "peers go on training without it" in text(page, "#lost")
    world.start()
    until(page, "document.querySelector('#health').textContent === 'healthy'")
    assert page.evaluate("window.untouched") and not page.locator("#lost").is_visible()
    before = len(world.swarm.chain.certificates)
    world.act(world.round())
    until(page, f"document.querySelector('#message').textContent.includes('round {before + 1},')")
    # The browser's own error about a missing server is no fault of the page.
    page.errors[:] = [e for e in page.errors if "ERR_CONNECTION_REFUSED" not in e and "ERR_INCOMPLETE" not in e]


def test_everything_is_reached_and_used_by_keyboard(world, tab):
    page = tab(world)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = []
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent"))
    assert {"Overview", "Peers", "Rounds", "Leaderboard", "Model"} <= set(reached)
    page.locator("#tabs a", has_text="Peers").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-sort=speed]")
    assert page.evaluate("document.activeElement.id") == "view", "who turns to a view is in it"
    page.locator("[data-sort=speed]").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("th[aria-sort=descending] [data-sort=speed]")
    assert page.evaluate("document.activeElement.dataset.sort") == "speed", "the focus outlives the new table"
    speeds = page.locator("#view .wide tbody tr td:nth-child(4)").all_inner_texts()
    numbers = [float(n.replace("k", "")) * (1000 if "k" in n else 1) for n in speeds]
    assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) > 5


@pytest.mark.parametrize(
    ("dark", "views"),
    [(False, VIEWS[:2]), *long_cases((False, VIEWS[2:]), (True, VIEWS[:3]))],  # colours are the same in all
    ids=["light", "others", "dark"],
)
def test_no_view_has_what_axe_calls_a_fault(world, tab, dark, views):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = tab(world, dark=dark)
    for view in views:
        page.goto(world.url + view)
        page.wait_for_selector("#view :is(.wide table, .join)")
        if not view:
            until(page, "document.querySelectorAll('.chart canvas').length === 6")
        found = axe.run(page)
        assert not found.response["violations"], (view, found.generate_report())


def test_on_a_phone_nothing_sticks_out(world, tab):
    page = tab(world, phone=True)
    for view in VIEWS:
        page.goto(world.url + view)
        page.wait_for_selector("#view :is(.wide table, .join)")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view


def test_names_of_strangers_are_text(world, tab):
    evil = "<img src=x onerror=window.evil=1>"
    world.says(3, device=evil)
    page = tab(world, "#peers")
    until(page, "document.querySelector('#view .wide tbody')?.innerText.includes('onerror')")
    assert page.evaluate("window.evil") is None and page.locator("#view img").count() == 0
    world.beats()


def test_the_owners_words_about_the_run_are_text(world, tab):
    page = tab(world, "#model")
    until(page, "document.querySelector('.card')?.innerText.includes('data: CC0')")
    assert "<b>Stories</b>" in text(page, ".card") and page.locator(".card b").count() == 0


def test_a_run_of_an_adapter_says_what_is_trained_and_that_its_checkpoint_is_no_model(world, tab):
    def with_adapter(route: Any) -> None:
        run = route.fetch().json()
        run["model"]["adapter"] = {"rank": 8, "alpha": 16, "dtype": "nf4", "base": 7_000_000_000}
        route.fulfill(json=run)

    page = tab(world, "#model")
    until(page, "document.querySelector('#view')?.innerText.includes('AutoModelForCausalLM')")
    page.route("**/api/run", with_adapter)
    page.reload()
    until(page, "document.querySelector('#view')?.innerText.includes('on a frozen base of')")
    said = text(page, "#view")
    assert "LoRA of rank 8, alpha 16" in said and "--merge" in said and "AutoModelForCausalLM" not in said


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = audited_world(tmp_path_factory.mktemp("audited"))
    yield world
    world.close()


def test_decisions_are_shown_with_the_numbers_of_each_reporter_and_what_they_cost(audited, tab):
    page = tab(audited, "#audits")
    rows = page.locator(".audits tbody tr")
    rows.nth(3).wait_for()
    convicted, acquitted, accused, suspected = rows.all_inner_texts()
    assert "convicted" in convicted and "signs 0.7 to 0.796, 0.97 is needed; measured by ada, grace" in convicted
    assert "credits void; no stake from before; barred until round 74" in convicted
    assert "acquitted" in acquitted and "the stake of ada, grace, who reported the opposite" in acquitted
    assert "one peer says so" in accused and "a loss check accuses nobody" in suspected
    assert EVIL in accused and page.locator("#view img").count() == 0, "names of scores are text"
    page.locator(".audits summary").first.click()
    assert "failed ada by replay: scale 0.93, at least 0.8; signs 0.7, below 0.97" in rows.first.inner_text()
    assert f"Repeat it: cairn audit update INVITE --round 7 --peer {peer(LIAR).key}" in rows.first.inner_text()
    before = page.evaluate("document.querySelector('.audits details').open")
    audited.act(audited.round(out=tuple(audited.barred)))
    until(page, f"document.querySelector('#message').textContent.includes('{len(audited.swarm.chain.certificates)},')")
    assert before and page.evaluate("document.querySelector('.audits details').open"), "it stays unfolded"


def test_the_convicted_and_the_accused_read_on_their_own_pages_what_they_can_do(audited, tab):
    page = tab(audited, f"#peer/{peer(LIAR).key}")
    page.wait_for_selector(".case")
    said = text(page, "#view")
    assert "It was convicted in round 9, and may be in no record before round 74." in said
    assert "What its volunteer can do: leave it running" in said and "Its pending credit (" in said
    page.wait_for_selector("section .why.missed")
    assert "voided by the conviction in round 9 for the update of round 7" in text(page, "#view")
    page.goto(f"{audited.url}#peer/{peer(STRANGER).key}")
    until(page, "document.querySelector('.case')?.dataset.verdict === 'open'")
    assert "Less than half of a jury's stake convicts nobody" in text(page, ".case")
    page.goto(f"{audited.url}#peer/{peer(FRAMED).key}")
    until(page, "document.querySelector('.case')?.dataset.verdict === 'acquitted'")
    assert "It costs this peer nothing" in text(page, ".case")
    page.goto(f"{audited.url}#peers")
    page.wait_for_selector("td.guilty")
    assert "convicted in round 9, barred until 74: the replays of 7 peers" in text(page, "td.guilty")


@pytest.mark.parametrize("dark", [False, *long_cases(True)], ids=["light", "dark"])
def test_audits_have_no_fault_by_axe_and_stick_out_nowhere(audited, tab, dark):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = tab(audited, dark=dark)
    small = tab(audited, phone=True)
    for view in ("#audits", f"#peer/{peer(LIAR).key}", f"#peer/{peer(STRANGER).key}", "#peers"):
        page.goto(audited.url + view)
        page.wait_for_selector("#view :is(.wide table, .join)")
        assert not axe.run(page).response["violations"], view
        small.goto(audited.url + view)
        small.wait_for_selector("#view .wide table")
        assert small.evaluate("document.documentElement.scrollWidth") <= 390, view


def test_a_peers_own_page_shows_its_rounds_and_receipts_that_can_be_checked(world, tab):
    page = tab(world, f"#peer/{peer(1).key}")
    rows = page.locator("section tbody tr")
    rows.first.wait_for()
    assert rows.count() == 20
    rows.first.locator("button").click()
    page.wait_for_selector(".holds")
    assert f"of 5 updates, with {WEIGHT} windows" in text(page, ".holds"), "as weighed"
    rows.nth(1).locator("button").click()
    until(page, "document.querySelectorAll('.holds').length === 2")
    assert "of 5 updates, with 3 windows" in rows.nth(1).inner_text()
    refused = page.locator("section tr", has_text="not accepted")
    assert "announced after the record was proposed" in refused.inner_text()
    refused.locator("button").click()
    until(page, "document.querySelectorAll('.holds').length === 3")
    page.locator("button", has_text="Older").click()
    until(page, "document.querySelectorAll('section tbody tr').length === 21")
    assert "cairn audit ledger" in text(page, "section")
    for view in (f"peer/{peer(1).key}", f"account/{ACCOUNT.key}"):
        page.goto(f"{world.url}#{view}")
        until(page, f"document.querySelector('#view img[src=\"/badge/{view}.svg\"]')?.naturalWidth > 100")
        assert text(page, ".line code") == f"![credits]({world.url}badge/{view}.svg)"


def test_a_strip_in_a_peers_view_shows_in_which_of_the_newest_rounds_it_was(world, tab):
    page = tab(world, f"#peer/{peer(5).key}")
    page.wait_for_selector(".strip")
    title, bars = page.evaluate(
        """() => {
            const strip = document.querySelector('.strip'), about = (r, name) => r.getAttribute(name);
            const bars = [...strip.children].map((r) => [about(r, 'class'), Number(about(r, 'height')), r.textContent]);
            return [about(strip, 'aria-label'), bars];
        }"""
    )
    missed = [said for kind, _, said in bars if kind == "out"]
    assert title.startswith(f"In {len(bars) - len(missed)} of the newest {len(bars)} rounds, with up to ")
    assert [said.split(":")[0] for _, _, said in bars] == [f"round {n}" for n in range(len(bars))]
    assert missed and all(re.search(": announced .* after the record was proposed", said) for said in missed)
    assert max(high for _, high, _ in bars) == 46 and {high for kind, high, _ in bars if kind == "out"} == {5}


@pytest.mark.parametrize("what", ["record", "another", "receipt"])
def test_a_tampered_record_does_not_hold(world, tab, what):
    log, fresh = world.log, FakeLog()
    if what == "record":
        log.records[6] = bytes([*log.records[6][:200], log.records[6][200] ^ 1, *log.records[6][201:]])
    elif what == "another":
        log.records[6] = log.records[7]
    else:
        log.liar = 6
    try:
        page = tab(world, f"#peer/{peer(1).key}")
        page.locator("section tr:has(a[href='#round/6']) button").click()
        page.wait_for_selector("section .missed")
        assert "does not hold" in text(page, "section .missed")
    finally:
        log.records, log.liar = fresh.records, None


@pytest.mark.long
def test_a_thousand_peers_and_a_long_run_open_with_few_bytes(browser, tab, tmp_path_factory):
    world = crowd(tmp_path_factory.mktemp("crowd"), rounds=CROWD_ROUNDS)
    try:
        wait_until(lambda: world.do(world.coordinator.overview).round == CROWD_ROUNDS, "all are followed", every=0.2)
        opened = []
        for _ in range(3):
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            page = context.new_page()
            session = context.new_cdp_session(page)
            session.send("Network.enable")
            sent = []
            session.on("Network.loadingFinished", lambda e, sent=sent: sent.append(e["encodedDataLength"]))
            began = time.monotonic()
            page.goto(world.url)
            until(page, "document.querySelectorAll('.chart canvas').length >= 4")
            until(page, "document.querySelectorAll('#view .wide tbody tr').length === 8")
            opened.append(time.monotonic() - began)
            context.close()
        print(f"opened with 1,000 peers and {CROWD_ROUNDS} rounds in {min(opened):.2f} s; {sum(sent):,} bytes")
        assert sum(sent) < 200_000
        page = tab(world, "#peers")
        until(page, "document.querySelectorAll('#view .wide tbody tr').length === 25")
        page.locator("input[type=search]").fill("radia-10")
        until(page, "document.querySelector('.bar small').textContent.includes('match')")
        names = page.locator("#view .wide tbody tr td:first-child").all_inner_texts()
        assert names and all(n.startswith("radia-10") for n in names)
        page.locator("input[type=search]").fill("")
        until(page, "document.querySelector('.bar small').textContent.trim() === '1 to 25 of 1000'")
        page.locator("button", has_text="Next").click()
        until(page, "document.querySelector('.bar small').textContent.trim() === '26 to 50 of 1000'")
        event = world.do(lambda: len(str(world.coordinator.api.event())))
        assert event < 1500, "what every viewer is sent every two seconds"
    finally:
        world.close()

"""Checks of what a person does: keys, filters, zoom, links that restore a view, the way back."""

from __future__ import annotations

from tests.suites.console.browser import Visit
from tests.suites.console.screens import some_rollout


def keys_move_and_open(visit: Visit) -> None:
    """`j` and `k` move through the rows, Enter opens one."""
    page = visit.open("rollouts")
    for _ in range(3):
        page.keyboard.press("j")
    page.keyboard.press("k")
    at = page.evaluate(
        "[...document.querySelectorAll('[data-row]')].indexOf(document.activeElement)"
    )
    assert at == 1, at
    page.keyboard.press("Enter")
    page.locator(".members").wait_for()


def brackets_move_in_the_group(visit: Visit) -> None:
    """`]` opens the next attempt at the task, `[` goes back."""
    page = visit.open(f"rollouts/{some_rollout(visit)}")
    page.locator(".member").first.click()
    visit.settle()
    first = visit.fragment()
    page.keyboard.press("]")
    visit.until("before => location.hash !== before", first)
    visit.settle()
    page.keyboard.press("[")
    visit.until("before => location.hash === before", first)


def slash_searches(visit: Visit) -> None:
    """`/` focuses the search, from every screen; what is typed there is no key."""
    page = visit.open("overview")
    page.keyboard.press("/")
    visit.until("() => document.activeElement?.type === 'search'")
    page.keyboard.type("j?k")
    assert page.locator("input[type=search]").input_value() == "j?k"


def question_mark_shows_the_keys(visit: Visit) -> None:
    """And Escape gives the focus back."""
    page = visit.open("rollouts")
    page.keyboard.press("j")
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").wait_for()
    assert "search in rollouts" in page.get_by_role("dialog").inner_text()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.matches('[data-row]')")


def a_link_restores_filters(visit: Visit) -> None:
    """Filters are in the link: it opens with the same rows."""
    page = visit.open("rollouts")
    page.get_by_label("Purpose").select_option("eval")
    visit.settle()
    page.get_by_text("Step, group, reward, length").click()
    page.get_by_label("reward min").fill("0.5")
    page.get_by_label("reward min").press("Tab")
    visit.settle()
    count = page.locator(".count").inner_text()
    link = visit.fragment()
    assert "purpose=eval" in link, link
    assert "reward_min=0.5" in link, link
    visit.open("overview")
    visit.open_hash(link)
    assert page.get_by_label("Purpose").input_value() == "eval"
    assert page.get_by_label("reward min").input_value() == "0.5"
    assert page.locator(".count").inner_text() == count


def headings_sort(visit: Visit) -> None:
    """Rows are sorted by what their heading says, which screen readers hear."""
    page = visit.open("rollouts")
    page.get_by_role("button", name="Reward").click()
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("Reward")
    column = page.locator("thead th").all_inner_texts().index("Reward ↓")
    values = page.locator(f"tbody td:nth-child({column + 1})").all_inner_texts()
    rewards = [float(value) for value in values if value != "–"]
    assert rewards == sorted(rewards, reverse=True)


def text_is_searched(visit: Visit) -> None:
    """Found rollouts have the text; it is marked in the one that is opened."""
    page = visit.open(f"rollouts/{some_rollout(visit, '&step=2')}")
    word = page.locator(".part-user .text, .part .text").first.inner_text().split()[0][:12]
    page = visit.open("rollouts?step=2")
    page.locator("input[type=search]").fill(word)
    page.keyboard.press("Enter")
    page.locator("tbody tr, .empty").first.wait_for()
    visit.settle()
    assert page.locator("tbody tr").count() >= 1
    page.locator("tbody a[data-row]").first.click()
    page.locator("mark").first.wait_for()
    assert page.locator("mark").first.inner_text().lower() == word.lower()
    page = visit.open("rollouts?step=2&text=no-rollout-says-this")
    page.get_by_text("No rollout like this").wait_for()


def dragging_zooms_all_curves(visit: Visit) -> None:
    """The range is in the link; a double click shows the whole again."""
    page = visit.open("curves?names=reward_mean,entropy")
    box = page.locator(".u-over").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 40, steps=5)
    page.mouse.up()
    visit.until("() => location.hash.includes('from=')")
    ticks = page.evaluate("location.hash.match(/from=([\\d.]+)&to=([\\d.]+)/).slice(1).map(Number)")
    assert 0 < ticks[0] < ticks[1], ticks
    page.locator(".u-over").first.dblclick()
    visit.until("() => !location.hash.includes('from=')")


def a_point_opens_its_step(visit: Visit) -> None:
    """A click in a curve."""
    page = visit.open("curves?names=reward_mean")
    box = page.locator(".u-over").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 40)
    page.get_by_role("heading", name="Step ").wait_for()


def metrics_are_chosen(visit: Visit) -> None:
    """Each has a box; the choice is in the link."""
    page = visit.open("curves?names=reward_mean")
    page.get_by_label("Filter metrics").fill("grad")
    page.get_by_label("grad_norm").check()
    page.locator("figure", has_text="grad_norm").wait_for()
    assert "grad_norm" in visit.fragment()


def four_runs_lie_over_each_other(visit: Visit) -> None:
    """The curves of three other runs are in the same chart; the link restores them."""
    page = visit.open("curves?names=reward_mean")
    for place, name in enumerate(("other", "third", "fourth"), 2):
        page.get_by_label(f"Beside, run {place}").select_option(name)
        page.locator(".u-legend", has_text=name).wait_for()
    link = visit.fragment()
    visit.open("overview")
    page = visit.open_hash(link)
    page.locator(".u-legend", has_text="fourth").wait_for()
    assert page.locator(".u-legend .u-series").count() >= 5, "time, and four runs"


def a_bar_shows_its_rollouts(visit: Visit) -> None:
    """Bars of rewards are links to the rollouts of that step and range."""
    page = visit.open("steps")
    bar = page.locator(".histogram a").first
    bar.focus()
    page.keyboard.press("Enter")
    page.locator("tbody tr").first.wait_for()
    assert "reward_min=" in visit.fragment()
    assert "step=" in visit.fragment()


def steps_are_walked(visit: Visit) -> None:
    """`[` and `]`, and groups by `j` and Enter."""
    page = visit.open("steps")
    last = visit.page.locator("h1").inner_text()
    page.keyboard.press("[")
    visit.until("t => document.querySelector('h1').textContent !== t", last)
    page.locator(".group").first.wait_for()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.locator(".group[open] tbody tr").first.wait_for()
    assert "group=" in visit.fragment()


def attempts_are_compared(visit: Visit) -> None:
    """Two attempts side by side; the task is the same and folded."""
    page = visit.open("steps?order=spread")
    page.locator(".group summary").first.click()
    page.get_by_role("link", name="Compare the best with the worst").click()
    page.get_by_role("heading", name="Compare").wait_for()
    page.locator(".shared, .pair .text").first.wait_for()
    assert page.locator(".shared").count() >= 1
    assert page.get_by_label("Rollout a", exact=True).first.is_visible()


def tokens_are_coloured(visit: Visit) -> None:
    """Each way to colour has a legend, is in the link, and arrows move between tokens."""
    page = visit.open(f"rollouts/{some_rollout(visit)}?tab=tokens")
    page.locator("[data-token]").first.wait_for()
    ways = page.get_by_label("Colour by").locator("option").all()
    names = [str(way.get_attribute("value")) for way in ways]
    expected = {"origin", "trained", "logprob", "gap", "advantage", "version", "server"}
    assert set(names) == expected, names
    for name in names:
        page.get_by_label("Colour by").select_option(name)
        visit.until("name => location.hash.includes(`color=${name}`)", name)
        assert page.locator(".legend .swatch").count() >= 2, name
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".inspector dd").first.inner_text() == "1"


def a_part_leads_to_its_tokens(visit: Visit) -> None:
    """From the conversation, at the part's first token."""
    page = visit.open(f"rollouts/{some_rollout(visit)}")
    page.locator(".part-assistant .plain").first.click()
    page.locator("[data-token]").first.wait_for()
    assert "tab=tokens" in visit.fragment()
    assert "from=" in visit.fragment()


def time_is_zoomed(visit: Visit) -> None:
    """The range of the nodes' lanes is in the link."""
    page = visit.open("nodes")
    page.get_by_role("button", name="Zoom in").click()
    assert "from=" in visit.fragment()
    page.get_by_role("button", name="Whole time").click()
    assert "from=" not in visit.fragment()


def colours_are_kept(visit: Visit) -> None:
    """Dark or light, as chosen last."""
    page = visit.open("overview")
    page.get_by_role("button", name="Dark colours").click()
    page.reload()
    page.get_by_role("button", name="Light colours").wait_for()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.get_by_role("button", name="Light colours").click()


def the_way_back_works(visit: Visit) -> None:
    """The browser's back button shows the view before, and the title has the focus."""
    page = visit.open("rollouts?purpose=train")
    page.locator("tbody a[data-row]").first.click()
    page.locator(".members").wait_for()
    page.go_back()
    page.locator("tbody tr").first.wait_for()
    assert visit.fragment().endswith("rollouts?purpose=train")
    assert page.evaluate("document.activeElement.tagName") == "H1"


def tab_goes_in_order(visit: Visit) -> None:
    """First past the head of the page, then through it."""
    page = visit.open("rollouts")
    page.reload()
    page.locator("tbody tr").first.wait_for()
    order = []
    for _ in range(4):
        page.keyboard.press("Tab")
        order.append(
            page.evaluate("document.activeElement.className || document.activeElement.tagName")
        )
    assert order[:3] == ["skip", "brand", "SELECT"], order


INTERACTIONS = (
    keys_move_and_open,
    brackets_move_in_the_group,
    slash_searches,
    question_mark_shows_the_keys,
    a_link_restores_filters,
    headings_sort,
    text_is_searched,
    dragging_zooms_all_curves,
    a_point_opens_its_step,
    metrics_are_chosen,
    four_runs_lie_over_each_other,
    a_bar_shows_its_rollouts,
    steps_are_walked,
    attempts_are_compared,
    tokens_are_coloured,
    a_part_leads_to_its_tokens,
    time_is_zoomed,
    colours_are_kept,
    the_way_back_works,
    tab_goes_in_order,
)

"""Checks of each screen: it shows what the run has, fits its window, and axe finds no fault."""

from __future__ import annotations

from collections.abc import Callable

from tests.suites.console.browser import Visit


def some_rollout(visit: Visit, where: str = "&step=3") -> str:
    """The first rollout of a list, as its link writes it."""
    page = visit.open(f"rollouts?purpose=train&state=finished{where}")
    href = page.locator("tbody a[data-row]").first.get_attribute("href") or ""
    return href.partition("/rollouts/")[2].partition("?")[0]


def views(visit: Visit) -> dict[str, str]:
    """Every view of the run, by name."""
    rollout = some_rollout(visit)
    visit.open(f"rollouts/{rollout}")
    compare = visit.page.locator(".members > a").get_attribute("href") or ""
    return {
        "overview": "overview",
        "curves": "curves?smooth=0.6",
        "step": "steps",
        "rollouts": "rollouts",
        "transcript": f"rollouts/{rollout}",
        "tokens": f"rollouts/{rollout}?tab=tokens",
        "compare": compare.partition(f"/{visit.run}/")[2],
        "nodes": "nodes",
    }


def has_no_fault(view: str) -> Callable[[Visit], None]:
    """A view fits its window, and axe-core finds nothing serious."""

    def check(visit: Visit) -> None:
        visit.open(view)
        assert visit.overflow() <= 0, f"{visit.overflow()} pixels too wide"
        assert not (faults := visit.faults()), faults

    return check


def runs(visit: Visit) -> None:
    """A row for each run, whose link opens it; a filter finds it by its name."""
    page = visit.open_hash("#/runs")
    page.get_by_label("Filter runs").fill("no such run")
    page.locator("tbody tr").first.wait_for(state="detached")
    page.get_by_label("Filter runs").fill(visit.run)
    page.get_by_role("link", name=visit.run, exact=True).click()
    page.get_by_role("heading", name=visit.run).wait_for()
    assert visit.fragment() == f"#/r/{visit.run}/overview"


def overview(visit: Visit) -> None:
    """State, signals, the curve of the reward, and logs that open."""
    page = visit.open("overview")
    page.get_by_role("heading", name="Waiting").wait_for()
    page.get_by_role("heading", name="Reward, up to step").wait_for()
    assert page.locator(".tile").count() >= 3
    with page.context.expect_page() as opened:
        page.locator(".logs a", has_text="trainer").click()
    assert '"msg"' in opened.value.locator("body").inner_text()
    opened.value.close()


def curves(visit: Visit) -> None:
    """A chart for each chosen metric, described in words, with its newest values; it is saved."""
    page = visit.open("curves?names=reward_mean,entropy")
    legend = page.locator(".u-legend").first.inner_text()
    assert any(digit in legend.partition(visit.run)[2] for digit in "0123456789"), legend
    assert "--" not in legend, legend
    saved = []
    for kind in ("CSV", "PNG"):
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Save reward_mean as {kind}").click()
        saved.append(download.value.path().read_bytes())
    assert saved[0].startswith(f"Step,{visit.run}".encode()), saved[0][:80]
    assert saved[1].startswith(b"\x89PNG"), saved[1][:8]
    labels = [each.get_attribute("aria-label") for each in page.locator("main canvas").all()]
    assert len(labels) == 2, labels
    assert "reward_mean" in str(labels[0])
    assert "highest" in str(labels[0])


def step(visit: Visit) -> None:
    """Groups with their spread; one that is opened shows its samples."""
    page = visit.open("steps")
    assert "steps made" in page.locator("[data-newest]").inner_text()
    page.locator(".group summary").first.click()
    rows = page.locator(".group[open] tbody tr")
    page.locator(".group[open] th", has_text="Answer").wait_for()
    assert rows.count() >= 2
    assert "±" in page.locator(".group .spread").first.inner_text()
    assert page.locator(".histogram rect").count() >= 1


def rollouts(visit: Visit) -> None:
    """Rows, as many as a page has, each with its purpose and what was said."""
    page = visit.open("rollouts")
    assert page.locator("tbody tr").count() == 50
    for title in ("Purpose", "Prompt"):
        cells = page.locator(f"td[data-title={title}]").all_inner_texts()
        assert len(cells) == 50, title
        assert all(text not in ("", "–") for text in cells), cells
    page.get_by_role("button", name="Show more").click()
    page.locator("tbody tr").nth(60).wait_for()


def transcript(visit: Visit) -> None:
    """Who said what, in order."""
    page = visit.open(f"rollouts/{some_rollout(visit)}")
    roles = page.locator(".part .role").all_inner_texts()
    assert "assistant" in roles, roles
    assert roles[0] != "assistant", roles
    assert page.locator(".members a.member").count() >= 2


def tokens(visit: Visit) -> None:
    """Every token once, with the log-prob of those that were sampled."""
    page = visit.open(f"rollouts/{some_rollout(visit)}?tab=tokens&color=origin")
    page.locator("[data-token]").first.wait_for()
    page.locator(".tokens .t-kind-0").first.click()
    shown = page.locator(".inspector").inner_text()
    assert "policy" in shown, shown
    assert "Log-prob" in shown, shown
    assert "Train − rollout" in shown, shown


def nodes(visit: Visit) -> None:
    """A lane for each node, described in words, and the decisions."""
    page = visit.open("nodes")
    lanes = page.locator(".lanepicture")
    lanes.first.wait_for()
    assert lanes.count() == 2
    assert "%" in str(lanes.first.get_attribute("aria-label"))
    assert page.locator("tbody tr").count() >= 1
    with page.expect_download() as download:
        page.get_by_role("link", name="Chrome trace").click()
    assert "traceEvents" in download.value.path().read_text()


SCREENS = (runs, overview, curves, step, rollouts, transcript, tokens, nodes)

"""Pages that open from a plain folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.console.app import STATIC
from services.console.bundle import write_pages

INDEX = '<head></head><script type="module" src="static/app.js"></script>'


def pages(folder: Path, **files: str) -> Path:
    """A folder of pages; "__" in a name is a slash."""
    for name, text in {"index.html": INDEX, **files}.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def test_modules_come_before_those_that_need_them(tmp_path: Path) -> None:
    """Each is a function that returns its exports."""
    files = {
        "app.js": 'import { a } from "./lib/a.js";\na();\n',
        "lib__a.js": 'import { b } from "./b.js";\nexport function a() {\n  return b;\n}\n',
        "lib__b.js": "export const b = 1;\n",
    }
    write_pages(pages(tmp_path / "static", **files), tmp_path / "out", {})
    script = (tmp_path / "out" / "static" / "app.bundle.js").read_text()
    places = [script.index(f'modules["{name}"] =') for name in ("lib/b.js", "lib/a.js", "app.js")]
    assert places == sorted(places)
    assert "import " not in script and "export " not in script


def test_data_are_a_script_that_the_page_loads_first(tmp_path: Path) -> None:
    """No text of a rollout can end the script, or become one."""
    text = "</script><script>alert(1)</script>\u2028"
    write_pages(pages(tmp_path / "static", **{"app.js": ""}), tmp_path / "out", {"runs": text})
    data = (tmp_path / "out" / "data.js").read_text()
    assert json.loads(data.removeprefix("globalThis.SEAMFLOW_BUNDLE = ").strip(";\n")) == {
        "runs": text
    }
    assert data.isascii()
    index = (tmp_path / "out" / "index.html").read_text()
    assert index.index("data.js") < index.index("app.bundle.js")
    assert 'type="module"' not in index


def test_a_page_of_another_form_is_refused(tmp_path: Path) -> None:
    """It would not run."""
    static = pages(tmp_path / "static", **{"app.js": "export default 1;\n"})
    with pytest.raises(ValueError, match=r"app.js imports or exports in another form"):
        write_pages(static, tmp_path / "out", {})


def test_the_console_s_own_pages_can_be_joined(tmp_path: Path) -> None:
    """As they are."""
    write_pages(STATIC, tmp_path / "out", {})
    assert (tmp_path / "out" / "static" / "app.bundle.js").stat().st_size > 10_000

"""`python -m tools.site`: write the pages to runs/site, and build the site with `seamflow[site]`.

Exits with 1 where a link or an anchor of a page leads nowhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.site.site_pages import llms_text, staged

ROOT = Path(__file__).parents[2]
_OUT = ROOT / "runs" / "site"
_QUIET = {"NO_MKDOCS_2_WARNING": "1"}
_CONFIG = ROOT / "docs" / "mkdocs.yml"


def main() -> int:
    """Returns the exit code of MkDocs."""
    pages = _OUT / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    for path, content in staged(ROOT).items():
        target = pages / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    (pages / "llms.txt").write_text(llms_text(ROOT), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(_CONFIG)]
    code = subprocess.run(command, env={**os.environ, **_QUIET}, check=False).returncode
    if code == 0:
        print(f"wrote {_OUT / 'html' / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())

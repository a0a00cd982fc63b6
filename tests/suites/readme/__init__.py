"""`make test-readme`: the pages' commands where only what the page installs is there."""

"""Where the code of the services lies: in the checkout, or in the wheel."""

from __future__ import annotations

from pathlib import Path

import seamflow

_PACKAGE = Path(seamflow.__file__).parent


def find_services(package: Path = _PACKAGE, here: Path | None = None) -> Path | None:
    """The folder that `services`, `trainer` and the others are imported from; None: there is none.

    That of the wheel, or the checkout that this very package lies in, so that SDK and services are
    of one release; only a package without services, as in the images, takes the checkout around
    the folder `here` (None: the current one).
    """
    here = Path.cwd() if here is None else here
    places = (package / "_services", package.parents[1], here, *here.parents)
    return next((place for place in places if (place / "services" / "launcher").is_dir()), None)

"""Two minutes of the soak (soak.py says what it does); SINKHORN_SOAK_MINUTES for another length."""

import os

from . import soak


def test_nothing_is_lost_and_nothing_grows(capsys):
    result = soak.soak(60 * float(os.environ.get("SINKHORN_SOAK_MINUTES", "2")))
    with capsys.disabled():
        print("\n" + soak.report(result))
    assert not result.faults()
    assert all(result.counts.get(kind, 0) > 0 for kind in soak.KINDS)

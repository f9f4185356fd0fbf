"""tune_gc, in a process of its own: its settings are for a whole process."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
from trio_llm.frontend.gc_tuning import tune_gc

class Cycle:
    pass

before = gc.get_threshold()
tune_gc()
assert gc.get_freeze_count() > 1000, gc.get_freeze_count()
assert all(new > old for new, old in zip(gc.get_threshold(), before)), gc.get_threshold()
one = Cycle()
one.itself = one
del one
assert gc.collect() >= 1, "younger objects are collected all the same"
assert gc.isenabled()
"""


def test_what_exists_is_left_out_and_what_comes_is_collected_less_often() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)

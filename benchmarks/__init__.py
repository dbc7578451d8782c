"""Benchmarks of forebay beside plain PyTorch and other systems: one harness, one file of cases a subject.

Reading order: ``case`` (what a case says), ``models`` (what is trained), ``contenders`` (who trains it),
``measure`` (rounds, interleaved), ``result`` (what is kept), ``table`` (what is shown), ``gpu`` (a machine with a
card, in short calls).
"""

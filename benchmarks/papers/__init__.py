"""What papers say of their systems, beside what the simulator says of our policies on the papers' machines.

shapes       GPT-shaped models by layers and width, and one policy's plan for a model of any shape
nets         residual networks, layers of a GPT with attention written out
segments     segments of several blocks that run again, by account
claims       the claims on parameters and states: each makes its plans and says what came of it
activations  the claims on activations
record       what is kept of a run
run          all claims, or some
table        the table in ``benchmarks/README.md`` and ``docs/policies.md``
"""

"""A program against a clock: how long a step takes, what waits for what, and how many bytes are where. No torch.

``simulate`` goes from a plan to a ``Timeline``, ``play`` from a program, ``pace`` from its score to the seconds alone;
``costs`` says how long one thing takes alone, ``score`` what a clock reads of a program, ``sharing`` how much slower a
thing is beside others, ``forecast`` sums a timeline up for people and planners, ``together`` says what a step takes
whose micro-batches pass the model together, and ``several`` what steps take on several devices of one host, or of
several models on one device. ``pages`` says what a card's allocator takes beyond what is live. ``schedule`` writes down
what devices do that share one model: ``stages`` of it that are swapped (``swapping``), or that stay (``pipeline``).
"""

from forebay.simulation.costs import Costs
from forebay.simulation.forecast import Forecast, forecast, limits, simulate, summarise
from forebay.simulation.pages import Played
from forebay.simulation.play import pace, play, settled_seconds
from forebay.simulation.score import Score
from forebay.simulation.several import SeveralForecast, alternating, side_by_side
from forebay.simulation.together import PassesForecast, by_turns, in_turn, together

__all__ = [
    "Costs",
    "Forecast",
    "PassesForecast",
    "Played",
    "Score",
    "SeveralForecast",
    "alternating",
    "by_turns",
    "forecast",
    "in_turn",
    "limits",
    "pace",
    "play",
    "settled_seconds",
    "side_by_side",
    "simulate",
    "summarise",
    "together",
]

"""The pages of the documentation: what they say is run, what they link to is there, what can be made is made.

    scripts/docs

markdown   blocks, links and headings of a page
printed    a page whose programs and commands are run, with what they print behind them
notebook   the same for a notebook
api        ``docs/api``, from the docstrings of the public interface
policies   ``docs/policies``, from those of the planners; uses says when to use one, example is what all are asked
"""

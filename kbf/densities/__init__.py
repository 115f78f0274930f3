"""Conditional laws p(y | u) of any shape, learned from pairs, and the choice between them: what a filter's memory is drawn from."""

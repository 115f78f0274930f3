"""Conditional densities p(y | u), fitted to pairs and selected by held-out log scores."""

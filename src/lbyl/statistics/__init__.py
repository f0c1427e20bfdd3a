"""Means and covariances at the inputs of consumers, measured or computed from weights."""

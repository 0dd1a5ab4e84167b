"""Rules of initial values, factors and rates, one file a rule."""

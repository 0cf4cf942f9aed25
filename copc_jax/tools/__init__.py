"""Tools that a policy may call."""

"""Rollouts: SGLang protocol, episodes, and the embedded server."""

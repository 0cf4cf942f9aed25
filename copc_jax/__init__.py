"""Coupled off-policy correction for asynchronous RL of language models."""

"""The smallest run that has everything, and its command: for tests of whole runs."""

import sys

import run

MODEL = (
    *("--tiny.vocab-size=1024", "--tiny.hidden-size=32", "--tiny.intermediate-size=32"),
    *("--tiny.num-layers=1", "--tiny.num-heads=2", "--tiny.num-kv-heads=1"),
)
# Of flags that are given twice, the later one counts.
RUN = (
    *("--task=search", "--batch-size=8", "--micro-batches=2", "--critic-warmup-updates=1"),
    *("--sft.updates=3", "--sft.demonstrations=200", *MODEL),
    *("--eval.questions=4", "--eval.final-questions=4"),
    *("--rollout.slots=8", "--rollout.max-in-flight=8"),
)


def command(*arguments):
    """Return the command line of a run with these flags."""
    return [sys.executable, run.__file__, *map(str, arguments)]

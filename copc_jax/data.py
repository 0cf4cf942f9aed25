"""The tokenizer of the default model, and the stream of prompts."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import grain
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from copc_jax.types import Prompt

logger = logging.getLogger(__name__)

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"

Segment = tuple[str, bool]
"""A piece of a demonstrated episode: text, and whether the policy wrote it."""


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int = 2048,
    *,
    special_tokens: Sequence[str] = (PAD_TOKEN, END_TOKEN),
    tags: Sequence[str] = (),
    pattern: str | None = None,
) -> tokenizers.Tokenizer:
    """Train a byte-level BPE tokenizer: any text goes in and comes out unchanged.

    Tags are added tokens, one id each and visible when decoded. Text is cut at them before anything
    else, so a segment that starts or ends with a tag has the same tokens alone as inside an
    episode.

    Args:
        texts: training texts.
        vocab_size: ids in all, special tokens and tags included.
        special_tokens: first ids; padding and end of text.
        tags: tag texts that get one id each.
        pattern: regular expression (Oniguruma) of the longest pieces that a token may span; by
            default GPT-2's. Numbers are copied more easily where it cuts them alike everywhere.
    """
    size = vocab_size - len(tags)
    smallest = 256 + len(special_tokens)
    if size < smallest:
        raise ValueError(f"vocab_size must be at least {smallest + len(tags)}, not {vocab_size}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is not None:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        byte_level = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.pre_tokenizer = byte_level  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()
    added = [tokenizers.AddedToken(tag, special=False, normalized=False) for tag in tags]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    cut = re.compile("|".join(map(re.escape, tags))) if tags else None
    tokenizer.train_from_iterator((cut.sub("\n", text) if cut else text for text in texts), trainer)
    tokenizer.add_tokens(added)
    return tokenizer


def dataset_fingerprint(prompts: Sequence[Prompt], seed: int) -> dict[str, Any]:
    """Return what tells streams of prompts apart: number, hash of the contents, and seed."""
    digest = hashlib.sha256()
    for prompt in prompts:
        fields = (prompt.prompt_id, prompt.messages, prompt.token_ids, prompt.gold)
        digest.update(json.dumps(fields, ensure_ascii=False, sort_keys=True).encode())
    return {"count": len(prompts), "sha256": digest.hexdigest(), "seed": seed}


class PromptIterator:
    """An endless stream of prompts in an order that a seed fixes, reshuffled every epoch.

    `get_state` and `set_state` carry the position, the share of the prompts that it is counted in,
    and the fingerprint of the data, all as plain JSON values.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        if not 0 <= process_index < process_count:
            raise ValueError(
                f"process_index {process_index} is not below process_count {process_count}"
            )
        if len(prompts) < process_count:
            raise ValueError(f"{len(prompts)} prompts are too few for {process_count} processes")
        self.fingerprint = dataset_fingerprint(prompts, seed)
        self._share = [process_index, process_count]
        # Processes take turns before the shuffle, so that none ever gets the prompt of another.
        source = grain.MapDataset.source(prompts)[process_index::process_count]
        endless = source.seed(seed).shuffle().repeat(None)
        # Prompts are in memory: reading ahead would only cost threads.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._iterator = iter(endless.to_iter_dataset(read_options=options))

    def __iter__(self) -> PromptIterator:
        return self

    def __next__(self) -> Prompt:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Return the position, the share and the fingerprint of the data."""
        return {
            "position": self._iterator.get_state(),
            "share": list(self._share),
            "fingerprint": dict(self.fingerprint),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position.

        Raises:
            ValueError: the state was saved over other prompts, with another seed, or over another
            share of the prompts, where the position means others; says what differs.
        """
        saved = state["fingerprint"]
        differing = [key for key, value in self.fingerprint.items() if saved.get(key) != value]
        if differing:
            details = ", ".join(
                f"{k}: saved {saved.get(k)}, now {self.fingerprint[k]}" for k in differing
            )
            raise ValueError(f"the saved prompt position belongs to another data set ({details})")
        # Checkpoints of before shares were saved do not say.
        share = list(state.get("share", self._share))
        if share != self._share:
            raise ValueError(
                f"the saved prompt position is of process {share[0]} of {share[1]}, this is "
                f"process {self._share[0]} of {self._share[1]}: deal positions anew"
            )
        self._iterator.set_state(dict(state["position"]))


def deal_positions(states: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Turn the states of iterators over shares of the prompts into those of `count` shares.

    Shares of another size are in another order, so that within the epoch under way some prompts
    come a second time and as many not at all; later epochs are whole.
    """
    taken = sum(state["position"]["next_index"] for state in states)
    return [
        {
            **states[0],
            "position": {"next_index": taken // count + (process < taken % count)},
            "share": [process, count],
        }
        for process in range(count)
    ]


def prompt_iterator(
    prompts: Sequence[Prompt],
    seed: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
    max_prompt_tokens: int | None = None,
    encode: Callable[[Prompt], Sequence[int]] | None = None,
) -> PromptIterator:
    """Return the endless shuffled stream of prompts.

    Args:
        prompts: all that there are.
        seed: seed of the order.
        process_index: this process among `process_count`; each gets every n-th prompt.
        process_count: processes that share the prompts.
        max_prompt_tokens: longer prompts are left out, and their number is logged; needs `encode`.
        encode: token ids of a prompt, such as `SearchTask.encode_prompt`.
    """
    if max_prompt_tokens is not None:
        if encode is None:
            raise ValueError("max_prompt_tokens needs encode")
        kept = [prompt for prompt in prompts if len(encode(prompt)) <= max_prompt_tokens]
        dropped = len(prompts) - len(kept)
        if dropped:
            logger.warning(
                "left out %d of %d prompts with more than %d tokens",
                dropped,
                len(prompts),
                max_prompt_tokens,
            )
        if prompts and not kept:
            raise ValueError(
                f"all {len(prompts)} prompts have more than {max_prompt_tokens} tokens, half of "
                "rollout.max_tokens: raise it, or take a shorter format"
            )
        prompts = kept
    return PromptIterator(
        prompts, seed=seed, process_index=process_index, process_count=process_count
    )
